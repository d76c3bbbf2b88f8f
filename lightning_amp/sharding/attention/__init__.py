"""Attention over ranks: a ring of keys and values, and the kernels that compute its blocks."""
