"""Our parts in place of those of a decoder of HiGLUE's shape: layout, keys, strata, the forms that copies have."""
