"""Read, check, prepare and synthesise data files, and make batches from them."""
