"""The strategy, its callbacks, and what they need of Lightning."""
