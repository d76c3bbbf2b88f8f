"""Whole state <-> shards: reading, writing and converting checkpoints."""
