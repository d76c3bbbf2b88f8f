"""Read the parts of HiGLUE decoders (layout, keys, strata) and build our decoder from them, for each supported form."""
