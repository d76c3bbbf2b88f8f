"""S1, data parallel: averaged gradients and shared batch statistics."""
