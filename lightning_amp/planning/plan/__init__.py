"""Define plans, strategies, and what the planner needs of a model."""
