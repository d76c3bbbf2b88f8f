"""S5, hidden-dimension parallel: channels of the keys."""
