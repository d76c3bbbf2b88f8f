"""Modules that nobody wrote for lightning_amp: under a budget, and beside what else one can do."""
