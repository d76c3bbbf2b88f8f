"""How many buckets of local attention S3 takes at a time; the memory model counts with the same number."""

CHUNK_QUERIES = 128
"""Queries per chunk of local attention; the paper uses 128 at 500 kb and 32 at 100 kb (Section 4)."""


def chunk_buckets(window: int) -> int:
    """Buckets of `window` queries in one chunk: about `CHUNK_QUERIES` queries, one bucket at least."""
    return max(1, CHUNK_QUERIES // window)
