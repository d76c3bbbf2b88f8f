"""The loop over strata: streamed, recomputed, or split over ranks."""
