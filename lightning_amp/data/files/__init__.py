"""Reading and naming files that exist: .h5ad, .scool, GraphML, HiGLUE's directories."""
