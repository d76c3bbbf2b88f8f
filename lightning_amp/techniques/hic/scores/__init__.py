"""Decode from keys first (S4) and the sparse likelihood."""
