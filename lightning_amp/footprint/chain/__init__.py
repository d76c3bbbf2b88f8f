"""Model a step as a chain of blocks: bytes and time of each, recomputed or in chunks."""
