"""Modules that nobody wrote for lightning_amp, against what else one can do."""
