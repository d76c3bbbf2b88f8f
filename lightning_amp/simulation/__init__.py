"""Simulate one training step of a planned model, at any size and on any number of ranks, in one process without a GPU.

The step is counted as for any plan (footprint/): on fake tensors, with the installed techniques, the reduction of
gradients and the optimiser. Collectives transfer nothing, for there are no other ranks.
"""
