"""Run parts of any module in chunks under a byte budget (AutoChunk): prediction, regions, generated code."""
