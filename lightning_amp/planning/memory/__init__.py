"""Predict the peak bytes of a step from its kept tensors and temporaries (the memory model)."""
