"""Shapes of tensors that many functions share, by name; `own_` marks what a device holds of a sharded axis."""

from jaxtyping import Float, Int
from torch import Tensor

Scalar = Float[Tensor, ""]
PerCell = Float[Tensor, "cell dim"]
"""A row of channels for every cell: the latent u."""
PerAnchor = Float[Tensor, "anchor dim"]
"""A row of channels for every anchor: the latent v, keys, queries, values."""
PerVertex = Float[Tensor, "own_vertex dim"]
"""A row of channels for every vertex of the guidance graph that the device holds."""
Counts = Float[Tensor, "cell feature"]
OwnCounts = Float[Tensor, "cell own_feature"]
"""A number for every cell and every feature that the device holds: counts, scores, means."""
OwnTable = Float[Tensor, "#cell own_feature"]
"""The same, or one row for all cells."""
Library = Float[Tensor, "cell 1"]
Experiment = Int[Tensor, " cell"]
"""Experimental batch of every cell, from 0."""
LogWeights = Float[Tensor, "#cell stratum"]
"""Logarithms of the strata's weights; one row for all cells where the weights do not depend on them."""
FeatureAnchor = Int[Tensor, " feature"]
"""Anchor of every feature of a stratum."""
