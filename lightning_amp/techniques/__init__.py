"""Techniques, one folder each: spec in a plan, prediction, install function and modules."""
