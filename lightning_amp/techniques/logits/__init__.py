"""Compute cross-entropy of a linear layer's outputs in chunks of rows, without storing all logits."""
