"""Shard parameters, gradients and optimiser state of any module over the data axis, by torch's fully_shard."""
