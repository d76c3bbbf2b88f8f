"""Sequence and domain parallelism: every sample is split over the ranks of the model axis; the module is unedited."""
