"""Read the profile of a data directory from file headers, without loading a matrix."""
