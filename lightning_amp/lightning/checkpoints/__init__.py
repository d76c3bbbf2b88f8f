"""Read, write and convert checkpoints, with full parameters or as a directory of shards."""
