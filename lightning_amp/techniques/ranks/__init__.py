"""Collectives with gradients, ownership of shards, entry and exit of the sharded region."""
