"""Ranks agree on options, data, batches and parameters, or the run stops."""
