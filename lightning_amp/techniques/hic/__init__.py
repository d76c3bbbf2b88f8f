"""Define techniques for decoders whose blocks are strata, such as those of Hi-C contact maps."""
