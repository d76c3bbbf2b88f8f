"""Define the stratified Hi-C decoder: its loss is a sum over strata, each a function of u and v only.

    stratum k   key = key_k(v), ZINB with mean softmax(logit) * library * weight[:, k] (stratum.py)
    weight      softmax(strata_weights + head(u)) over strata
    loss        minus the mean log-likelihood over all cells and features

Legend: cell, anchor (N), dim (D), stratum (K), feature (F in all, F_k of stratum k, stratum-major).
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, cast, get_args

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.errors import ModelError
from lightning_amp.models.decoders.likelihoods import Output
from lightning_amp.models.decoders.stratum import Decode as Decode
from lightning_amp.models.decoders.stratum import EveryStratum, KeyModule
from lightning_amp.models.decoders.stratum import Stratum as Stratum
from lightning_amp.models.decoders.stratum_keys import AttentionKey, ConvolutionKey, Variant
from lightning_amp.shapes import Counts, Experiment, Library, LogWeights, PerAnchor, PerCell, Scalar

KeyKind = Literal["attention", "full_attention", "convolution"]


class StrataRegion(nn.Module):
    """Inputs and result of the strata, unchanged on one device; a leaf module, which a technique can replace."""

    def enter(
        self, u: PerCell, v: PerAnchor, log_weights: LogWeights
    ) -> tuple[Float[Tensor, "cell own_dim"], Float[Tensor, "anchor own_dim"], LogWeights]:
        """Return the strata's inputs, from those of the decoder."""
        return u, v, log_weights

    def n_rows(self, n_anchors: int) -> int:
        """Return the number of rows of v that the decoder receives."""
        return n_anchors

    def leave(self, total: Scalar) -> Scalar:
        """Return the negative log-likelihood of all features, from that of this rank's features."""
        return total


class StratifiedDecoder(nn.Module):
    """Decoder of all strata of the Hi-C modality.

    Args:
        dim: channels D of u and v.
        feature_anchors: for each stratum, the anchor of each of its features.
        stratum_index: for each stratum, its distance k in anchors; 0 means that the key is v itself.
        n_anchors: anchors N.
        n_batches: experimental batches.
        key: "attention" (local), "full_attention" or "convolution".
        variant: form of the attention key, "higlue" or "paper".
        chained: each stratum's attention key reads the previous stratum's projected anchors.
        window: anchors per bucket of local attention; 20 times the number of strata when None.
        strata_weight_head: whether the weights of the strata depend on the cell.
        binarized: Bernoulli likelihood of x > 0 instead of ZINB.
        shares: the strata's shares of all contacts, the first weights; None for a decrease as 1 / distance.

    Raises:
        ModelError: settings that contradict each other or the strata.
    """

    def __init__(
        self,
        dim: int,
        feature_anchors: Sequence[ArrayLike],
        *,
        stratum_index: Sequence[int],
        n_anchors: int,
        n_batches: int,
        key: KeyKind = "attention",
        variant: Variant = "higlue",
        chained: bool = False,
        window: int | None = None,
        strata_weight_head: bool = False,
        binarized: bool = False,
        shares: Sequence[float] | None = None,
    ):
        super().__init__()
        _check_settings(key, chained, window)
        rows = [np.asarray(n, dtype=np.int64) for n in feature_anchors]
        _check_strata(rows, stratum_index, n_anchors)
        self.dim = dim
        self.n_anchors = n_anchors
        self.n_strata = len(rows)
        self.chained = chained
        self.variant = variant
        # full attention has no buckets: anchors can be sharded anywhere
        self.window = 1 if key == "full_attention" else 20 * self.n_strata if window is None else window
        self.n_features = sum(len(r) for r in rows)
        keys = [self._key(key, k) for k in stratum_index]
        ends = list(accumulate(map(len, rows)))
        self.strata = nn.ModuleList(
            Stratum(
                keys[i],
                torch.tensor(rows[i]),
                distance=stratum_index[i],
                columns=(ends[i] - len(rows[i]), ends[i]),
                n_batches=n_batches,
                chained=chained and keys[i] is not None,
                binarized=binarized,
            )
            for i in range(self.n_strata)
        )
        self.region = StrataRegion()
        self.walk = EveryStratum()
        # contacts decrease about as 1 / distance
        float_type = torch.get_default_dtype()
        first = -torch.tensor(stratum_index, dtype=float_type).log1p()
        self.strata_weights = nn.Parameter(first if shares is None else torch.tensor(shares, dtype=float_type).log())
        self.head = nn.Linear(dim, self.n_strata) if strata_weight_head else None
        if self.head is not None:
            # initially all cells have the same weights
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    def forward(
        self, u: PerCell, v: PerAnchor, *, batch: Experiment, library: Library, x: Counts | SparseCounts
    ) -> Scalar:
        """Return minus the mean log-likelihood over all cells and features; library must be positive.

        Raises:
            ModelError: x has not one column per feature, or v not one row per anchor.
        """
        self._check_inputs(v, x)
        if isinstance(x, SparseCounts):
            # prepare the slices of all strata in a few operators
            x.expect(tuple(cast(Stratum, stratum).columns for stratum in self.strata))
        u, v, log_weights = self.region.enter(u, v, self.log_weights(u))
        total = self.walk(self.strata, u, v, log_weights, batch=batch, library=library, x=x)
        total = self.region.leave(total)
        return total / x.numel()

    def predicted(
        self, u: PerCell, v: PerAnchor, *, batch: Experiment, library: Library, output: Output = "expected"
    ) -> Counts:
        """Return the expected contacts of every feature, or another `Output`, in the order of the data matrix."""
        u, v, log_weights = self.region.enter(u, v, self.log_weights(u))
        # one stratum after the other: a chained stratum reads v of the previous one
        found = []
        for i, module in enumerate(self.strata):
            own, v = cast(Stratum, module).predicted(
                v, u, output=output, batch=batch, library=library, log_weight=log_weights[:, i : i + 1]
            )
            found.append(own)
        return torch.cat(found, dim=1)

    def log_weights(self, u: PerCell) -> LogWeights:
        """Return the log of each stratum's share of a cell's contacts; without a head, one row for all cells."""
        logits = self.strata_weights[None]
        return (logits if self.head is None else logits + self.head(u)).log_softmax(dim=1)

    def _key(self, kind: KeyKind, stratum: int) -> KeyModule | None:
        if stratum == 0:
            return None
        if kind == "convolution":
            return ConvolutionKey(self.dim, stratum)
        return AttentionKey(self.dim, None if kind == "full_attention" else self.window, variant=self.variant)

    def _check_inputs(self, v: Tensor, x: Tensor | SparseCounts) -> None:
        if x.shape[1] != self.n_features:
            raise ModelError(
                f"StratifiedDecoder got x with {x.shape[1]!r} columns, but its strata have "
                f"{self.n_features!r} features; use the data that the model was built for"
            )
        n_rows = self.region.n_rows(self.n_anchors)
        if len(v) != n_rows:
            raise ModelError(
                f"StratifiedDecoder got v with {len(v)!r} rows, but it was built for {n_rows!r} anchors; use"
                " the anchors of the data that the decoder was built for"
            )


def _check_settings(key: KeyKind, chained: bool, window: int | None) -> None:
    if key not in get_args(KeyKind):
        raise ModelError(f"StratifiedDecoder(key={key!r}): choose one of {get_args(KeyKind)!r}")
    if key == "full_attention" and window is not None:
        raise ModelError(
            f"StratifiedDecoder(key='full_attention', window={window!r}): full attention has no window; leave it out,"
            " or use key='attention', which is local"
        )
    if chained and key == "convolution":
        raise ModelError(
            "StratifiedDecoder(chained=True, key='convolution'): only attention keys can be chained; "
            "use chained=False, key='attention' or key='full_attention'"
        )


def _check_strata(feature_anchors: list[NDArray[np.int64]], stratum_index: Sequence[int], n_anchors: int) -> None:
    if not feature_anchors or len(feature_anchors) != len(stratum_index):
        raise ModelError(
            f"StratifiedDecoder got {len(feature_anchors)!r} strata and {len(stratum_index)!r} stratum indices; "
            "give one index per stratum and at least one stratum"
        )
    for i, rows in enumerate(feature_anchors):
        if len(rows) == 0:
            raise ModelError(f"StratifiedDecoder: stratum {i!r} has no feature; leave it out")
        if rows.min() < 0 or rows.max() >= n_anchors:
            raise ModelError(
                f"StratifiedDecoder: stratum {i!r} has anchors {int(rows.min())!r}..{int(rows.max())!r}, "
                f"allowed are 0..{n_anchors - 1!r}"
            )
