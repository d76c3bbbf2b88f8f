"""Techniques, one folder each: what a plan says of it, its prediction, its installation and its modules."""
