"""Three tools of autograd that know nothing of strata."""
