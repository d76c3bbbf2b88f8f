"""Finds, reads and writes files: .h5ad, cooler's formats, GraphML, and HiGLUE's directories."""
