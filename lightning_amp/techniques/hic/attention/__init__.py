"""Local attention in chunks (S3) and fused."""
