"""3D tensor parallelism: layers are split over a grid of ranks, as in AxoNN (Singh et al. 2024, arXiv 2305.13525)."""
