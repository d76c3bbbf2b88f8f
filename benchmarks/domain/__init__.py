"""Sequence and domain parallelism: what a rank holds and sends."""
