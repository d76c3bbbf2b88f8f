"""Stages of a pipeline: which blocks a rank runs of an unedited step, and the micro-batches through them."""
