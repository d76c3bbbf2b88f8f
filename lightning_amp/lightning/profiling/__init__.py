"""Profile what a run will read and do, before anything is installed."""
