"""Simulate one training step of a planned model, at any size and on any number of ranks, in one process without a GPU.

Tensors have shapes but no values (torch's meta device), collectives transfer nothing (torch's fake process group), and
every byte that the step would hold is counted. The simulation runs the training code itself: the model, the installed
techniques, the reduction of gradients and the optimiser.
"""
