"""3D tensor parallelism: layers are split over a grid of ranks, as in AxoNN (Singh et al., 4D parallelism, 2023)."""
