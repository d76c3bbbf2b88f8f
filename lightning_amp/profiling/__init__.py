"""Data files and model metadata -> Profile, without a forward pass and without a matrix in memory."""
