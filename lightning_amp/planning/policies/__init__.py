"""`plan`: policies auto and paper choose strategies, and these become rules."""
