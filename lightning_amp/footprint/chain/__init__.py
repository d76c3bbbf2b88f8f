"""Model a step as a chain of blocks: bytes and time of each block, recomputed or in chunks."""
