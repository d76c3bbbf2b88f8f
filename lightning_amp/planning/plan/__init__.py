"""The nouns: what a plan is, which strategies there are, what a model looks like to the planner."""
