"""Pipelined steps of a module: micro-batches, checks of samples and side effects, replay of side effects."""
