"""Compare training in one process with training on several ranks, with the user's model and batch."""
