"""Reads, checks, prepares and synthesises data files, and makes batches of them."""
