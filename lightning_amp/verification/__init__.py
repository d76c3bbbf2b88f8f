"""One process against several ranks, on a model and a batch of the user's own."""
