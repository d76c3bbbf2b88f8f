"""Plans of any module: which of its blocks are computed again in the backward pass."""
