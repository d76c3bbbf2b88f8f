"""Run the loop over strata: streamed, recomputed, compiled, or split over ranks."""
