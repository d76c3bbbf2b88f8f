"""What a person asks beyond one plan: what if, how many devices."""
