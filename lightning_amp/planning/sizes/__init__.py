"""What one rank has of one stratum, and the best split of strata over ranks."""
