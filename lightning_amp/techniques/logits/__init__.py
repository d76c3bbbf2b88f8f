"""Cross-entropy of a linear layer's outputs in chunks of rows, without the whole logits."""
