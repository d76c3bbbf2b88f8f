"""Define the Plan of a run."""
