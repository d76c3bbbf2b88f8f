"""Run regions of any module in chunks within a memory budget (AutoChunk): prediction, regions, generated code."""
