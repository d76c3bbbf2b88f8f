"""Compute local attention in chunks (S3), with a hand-written backward pass (fused), or in torch's kernels (sdpa)."""
