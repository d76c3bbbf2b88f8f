"""What a plan is, which strategies there are, and what the planner knows of a model."""
