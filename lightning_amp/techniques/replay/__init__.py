"""Activation checkpointing of any stretch of a training step, by replaying its operators in the backward pass."""
