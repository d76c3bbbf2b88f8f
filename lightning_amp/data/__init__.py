"""Read, check, prepare and synthesise data files, and load batches from them."""
