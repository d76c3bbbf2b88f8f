"""Collectives with gradients, who holds what, entry and exit of the sharded region."""
