"""Pipelines: cutting layers into stages beside others' ways, what a cut is worth, and training by stages."""
