"""Make data directories from a user's files or from synthetic cells."""
