"""Predict seconds of operators, collectives and steps (the cost model)."""
