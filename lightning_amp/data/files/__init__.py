"""Find, read and write files: .h5ad, cooler's formats, GraphML, and HiGLUE's directories."""
