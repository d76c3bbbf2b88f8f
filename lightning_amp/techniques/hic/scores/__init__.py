"""Decode from selected keys (S4), and compute the sparse likelihood."""
