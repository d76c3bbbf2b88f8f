"""Run the loop over strata: streamed, recomputed, compiled, or sharded over ranks."""
