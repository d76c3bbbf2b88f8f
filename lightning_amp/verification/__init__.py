"""Compare one process with several ranks, on the user's model and batch."""
