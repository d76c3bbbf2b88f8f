"""Models of public libraries, which nobody wrote for lightning_amp, under budgets and on two ranks."""
