"""Attacks on tensor3d, its exactness, bytes, loss curves, scale and peers; what docs/reports/tensor3d.md says."""
