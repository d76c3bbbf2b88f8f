"""Reads the profile of a data directory from file headers, without a matrix in memory."""
