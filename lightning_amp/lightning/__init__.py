"""The Lightning strategy, its callbacks, and the parts of a run that they use."""
