"""Run the loop over strata: streamed, recomputed, or sharded over ranks."""
