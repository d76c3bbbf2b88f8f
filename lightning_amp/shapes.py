"""Name tensor shapes that many functions share; `own_` marks the part of a sharded axis that this rank has."""

from jaxtyping import Float, Int
from torch import Tensor

Scalar = Float[Tensor, ""]
PerCell = Float[Tensor, "cell dim"]
"""One row per cell: the latent u."""
PerAnchor = Float[Tensor, "anchor dim"]
"""One row per anchor: the latent v, keys, queries, values."""
PerVertex = Float[Tensor, "own_vertex dim"]
"""One row per vertex of the guidance graph that this rank has."""
Counts = Float[Tensor, "cell feature"]
OwnCounts = Float[Tensor, "cell own_feature"]
"""One number per cell and per feature of this rank: counts, scores, means."""
OwnTable = Float[Tensor, "#cell own_feature"]
"""The same as OwnCounts, or one row for all cells."""
Library = Float[Tensor, "cell 1"]
Experiment = Int[Tensor, " cell"]
"""Experimental batch of every cell, from 0."""
LogWeights = Float[Tensor, "#cell stratum"]
"""Logarithms of the strata's weights; one row for all cells if the weights do not depend on the cell."""
FeatureAnchor = Int[Tensor, " feature"]
"""Anchor of every feature of a stratum."""
