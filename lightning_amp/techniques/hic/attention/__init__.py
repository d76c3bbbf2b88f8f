"""Compute local attention in chunks (S3), by hand (fused), or in torch's kernels (sdpa)."""
