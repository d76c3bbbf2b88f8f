"""Which runs of a captured block's operators are computed piece by piece, and in how many pieces; without torch."""
