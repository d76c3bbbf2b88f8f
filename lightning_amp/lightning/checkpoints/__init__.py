"""Read, write and convert checkpoints: whole state and shards."""
