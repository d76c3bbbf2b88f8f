"""Sequence and domain parallelism: shard every sample over the ranks of the model axis, without editing the module."""
