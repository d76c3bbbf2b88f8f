"""Limit what compiled modules keep for the backward pass, by the activation memory budget of torch's partitioner."""
