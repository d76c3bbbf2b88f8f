"""Choose which operators of a captured block run piece by piece, and in how many pieces; does not import torch."""
