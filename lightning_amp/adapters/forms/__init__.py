"""Replace the parts of a decoder of HiGLUE's shape by ours: layout, keys and strata, for each supported form."""
