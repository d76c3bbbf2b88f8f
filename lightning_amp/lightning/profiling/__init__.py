"""Read example batches and profile the steps of a run, before anything is installed."""
