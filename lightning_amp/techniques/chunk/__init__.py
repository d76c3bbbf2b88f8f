"""Regions of a captured block run chunk by chunk, forward and backward, as a plan of techniques/chunk/regions asks."""
