"""A look at what a run will read and do, before anything is installed: cells per step, a batch, the step itself."""
