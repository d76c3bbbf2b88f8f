"""Three tools of autograd, independent of strata."""
