"""Detect HiGLUE's decoder of one or several resolutions, and build our decoder from its layers.

    res_specs                                   n_strata, n_anchors and anchor_offset (first row in v) per resolution
    band_idx_0, band_idx_1, ...                 [stratum, anchor] of a resolution: column in the data, or -1
    scale_lin, bias, log_theta, zi_logits       tables [experiment, feature], as in higlue.py
    key_convs_by_res, key_conv_activations_by_res           a list per resolution, a layer per stratum but the first
    prenorm_, qk_, attn_, postnorm_, ff_layers_by_res       the same, with use_attn
    strata_weights_by_res, strata_weight_heads              one per resolution
    checkpoint, auto_checkpoint                             whether keys are recomputed in the backward pass

`forward(u, v, b, l, subset=None)` returns a distribution; l has one library size per resolution. With a `subset`, whose
`anchors` are the drawn anchors of every resolution, the distribution has only their features. A stratum's features
must be a run of columns, after the run of the previous stratum.

Legend: cell (B), anchor (N of all resolutions), dim (D), stratum (K of all), feature (F), resolution (R).
"""

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lightning_amp.adapters.forms.adapted_decoder import (
    AdaptedConvolutionKey,
    AdaptedDecoder,
    AdaptedStratum,
    Layout,
    NotDetected,
    PairedAttentionKey,
)
from lightning_amp.adapters.forms.higlue import Form, dim_of, make_stratum, resembles
from lightning_amp.errors import InstallError, ModelError
from lightning_amp.footprint.forward_overrides import overrides_of, set_overrides
from lightning_amp.models.decoders.stratum_keys import LocalAttention
from lightning_amp.shapes import Library, LogWeights, PerCell
from lightning_amp.techniques.ranks.sharded_region import SharedRegion

ATTENTION = {
    "prenorm": "prenorm_layers_by_res",
    "qk": "qk_layers_by_res",
    "attention": "attn_layers_by_res",
    "postnorm": "postnorm_layers_by_res",
    "ff": "ff_layers_by_res",
}
PAIRS = {"pairs": "key_convs_by_res", "activation": "key_conv_activations_by_res"}
SPEC = ("n_strata", "n_anchors", "anchor_offset")
WITH_SUBSETS = ("strata",)
"""Techniques that support a subset over ranks: a rank's shard must not depend on the features."""


def resembles_multires(module: nn.Module) -> bool:
    """Whether a module has what no other kind of module would have by chance."""
    return resembles(module, ("res_specs", "band_idx_0", "key_convs_by_res", "strata_weights_by_res"))


def bands(module: nn.Module) -> list[Tensor]:
    """Return the columns [stratum, anchor] of every resolution, -1 for none."""
    found = []
    for i, spec in enumerate(cast(Any, module).res_specs):
        band = getattr(module, f"band_idx_{i}", None)
        sizes = tuple(getattr(spec, name, None) for name in SPEC)
        if not all(isinstance(size, int) and size >= 0 for size in sizes):
            raise NotDetected(f"has a resolution {i!r} with {SPEC!r} = {sizes!r}, and not whole numbers")
        if not isinstance(band, Tensor) or tuple(band.shape) != sizes[:2] or band.dtype != torch.int64:
            shape = tuple(band.shape) if isinstance(band, Tensor) else band
            raise NotDetected(f"has band_idx_{i}={shape!r}, and not columns of the shape {sizes[:2]!r}")
        found.append(band.detach().cpu())
    return found


def read_bands(module: nn.Module) -> Layout:
    """Read the layout of the strata of all resolutions, one after the other."""
    nodes: list[Tensor] = []
    columns: list[tuple[int, int]] = []
    end = 0
    for i, band in enumerate(bands(module)):
        for k, row in enumerate(band):
            places = row[row >= 0]
            if not len(places) or not torch.equal(places, torch.arange(end, end + len(places))):
                raise NotDetected(
                    f"has a stratum {k!r} of resolution {i!r} whose columns do not follow each other from {end!r} on"
                )
            nodes.append((row >= 0).nonzero().flatten())
            columns.append((end, end + len(places)))
            end += len(places)
    most = max(spec.n_anchors for spec in cast(Any, module).res_specs)
    return Layout(nodes=tuple(nodes), columns=tuple(columns), n_anchors=most)


class MultiResStratum(AdaptedStratum):
    """Stratum of one resolution; each resolution has its library size."""

    resolution: int
    # columns of the tables, if a subset makes them no run
    places: Tensor | None = None

    def own_library(self, library: Float[Tensor, "cell resolution"]) -> Library:
        """Return the library size of the resolution."""
        return library[:, self.resolution : self.resolution + 1]

    def _columns(self, table: Tensor) -> Tensor:
        return super()._columns(table) if self.places is None else table.index_select(1, self.places)

    def among(self, nodes: Tensor, places: Tensor, columns: tuple[int, int]) -> "MultiResStratum":
        """Return this stratum for some features, with installed techniques; `columns` are their columns in the data."""
        # a shallow copy with a new dict of buffers: parameters and installed modules are shared
        own = copy.copy(self)
        set_overrides(own, overrides_of(self) or ())
        own._buffers = self._buffers | {"feature_anchor": nodes}
        own.places, own.columns = places, columns
        own.runs = dict.fromkeys(self.runs, places)
        return own


class MultiResDecoder(AdaptedDecoder):
    """Decoder of all strata of all resolutions of a foreign decoder; arguments as in AdaptedDecoder."""

    reads_all_rows = False

    def __init__(self, module: Any, strata: Sequence[MultiResStratum], layout: Layout, *, kind: type) -> None:
        super().__init__(
            strata,
            layout,
            dim=dim_of(module),
            window=max(getattr(module, "attn_windows", None) or [1]),
            variant="higlue",
            strata_weights=None,
            head=None,
            normalised=False,
            kind=kind,
        )
        self.weights_by_resolution = module.strata_weights_by_res
        self.heads = module.strata_weight_heads
        self.bands = bands(module)
        self.offsets = [spec.anchor_offset for spec in module.res_specs]

    def log_weights(self, u: PerCell) -> LogWeights:
        """Return the log of each stratum's share of a cell's contacts at its resolution."""
        found = []
        for i, weights in enumerate(self.weights_by_resolution):
            logits = weights[None] if self.heads is None else weights[None] + self.heads[i](u)
            found.append(logits.log_softmax(dim=1))
        return torch.cat(found, dim=1)

    def library(self, u: PerCell, given: Any) -> Float[Tensor, "cell resolution"]:
        """Return the library sizes of every resolution, from the decoder's argument l."""
        n = len(self.bands)
        if given is None:
            return u.new_ones(len(u), n)
        if not isinstance(given, Tensor) or tuple(given.shape) not in ((len(u), 1), (len(u), n)):
            found = tuple(given.shape) if isinstance(given, Tensor) else given
            raise ModelError(
                f"a decoder of {n!r} resolutions was called with l={found!r}; allowed are None and the library sizes"
                f" of every cell, of the shape {(len(u), 1)!r} or {(len(u), n)!r}"
            )
        return given.to(u.dtype).expand(-1, n)

    def unpredicted(self, module: Any) -> list[str]:
        """Return notes on memory that the prediction omits, to follow the foreign decoder's name in a message."""
        found, drawn = [], getattr(module, "anchor_subsample", None)
        if len(self.bands) > 1:
            found.append(
                f"has {len(self.bands)!r} resolutions, and every stratum is predicted with the anchors of the largest"
            )
        if drawn:
            found.append(f"draws {drawn!r} anchors of a resolution in every step, and is predicted for all of them")
        return found

    def among(self, subset: Any) -> "MultiResDecoder":
        """Return the decoder for the features of some anchors, with installed techniques.

        `subset` is drawn by the foreign decoder, and has `anchors` of every resolution.
        """
        shared = self.region.strategies if isinstance(self.region, SharedRegion) else ()
        if not set(WITH_SUBSETS).issuperset(shared):
            raise InstallError(
                f"a decoder was called with a subset of its anchors, and {', '.join(shared)} share its features or"
                " channels among ranks once and for all; allowed together with a subset are 'strata' and what needs one"
                f" device: leave {', '.join(shared)} out, or set anchor_subsample=None"
            )
        strata, every, end = iter(cast(Any, self.strata)), [], 0
        parts: list[MultiResStratum] = []
        for anchors, band, offset in zip(subset.anchors, self.bands, self.offsets, strict=True):
            for k, row in enumerate(band.to(anchors.device)):
                places = row[anchors]
                nodes, places = anchors[places >= 0], places[places >= 0]
                # the keys of the first stratum are rows of v
                nodes = nodes if k else nodes + offset
                parts.append(next(strata).among(nodes, places, (end, end + len(places))))
                every.append(places)
                end += len(places)
        places = torch.cat(every)
        # on a GPU, the comparison would synchronize in every step
        if places.device.type == "cpu" and not torch.equal(subset.cols, places):
            raise InstallError(
                f"a decoder was called with a subset of {len(subset.cols)!r} columns, which are not those of the"
                " anchors that it says to have drawn; allowed is what `sample_feature_subset()` returns"
            )
        own = copy.copy(self)
        # a shallow copy: parameters and installed modules are shared; only the lists of features are new
        own._modules = self._modules | {"strata": nn.ModuleList(parts)}
        own.n_features = end
        return own


def make_multires(module: Any, layout: Layout, form: Form) -> MultiResDecoder:
    """Build our decoder from a module's layers and tables; uses `kind`, `least` and `ours` of the form."""
    strata: list[MultiResStratum] = []
    for i, spec in enumerate(module.res_specs):
        for k in range(spec.n_strata):
            place = len(strata)
            key = _key(module, i, k) if k else None
            nodes = layout.nodes[place] + (0 if k else spec.anchor_offset)
            stratum = make_stratum(MultiResStratum, module, key, nodes, layout.columns[place], form)
            stratum.resolution = i
            strata.append(stratum)
    return MultiResDecoder(module, strata, layout, kind=form.kind)


def _key(module: Any, i: int, k: int) -> nn.Module:
    spec = module.res_specs[i]
    rows = slice(spec.anchor_offset, spec.anchor_offset + spec.n_anchors)
    layers = {name: _layers(module, i, foreign)[k - 1] for name, foreign in PAIRS.items()}
    if not isinstance(layers["pairs"], nn.Conv1d):
        raise NotDetected(f"has key_convs_by_res of the type {type(layers['pairs']).__name__!r}")
    if not module.use_activation:
        layers["activation"] = nn.Identity()
    pairs = AdaptedConvolutionKey(layers["pairs"], layers["activation"], padding=k, rows=rows)
    if not module.use_attn:
        return pairs
    layers = {name: _layers(module, i, foreign)[k - 1] for name, foreign in ATTENTION.items()}
    windows = {cast(Any, layer).window_size for layer in _layers(module, i, ATTENTION["attention"])}
    if len(windows) != 1:
        # the foreign forward would use the first layer's window for all
        raise NotDetected(f"has attention with windows of {windows!r} anchors at one resolution")
    layers["attention"] = LocalAttention(dim_of(module), windows.pop())
    again = bool(module.checkpoint or module.auto_checkpoint[i])
    return PairedAttentionKey(pairs, layers, checkpointed=again)


def _layers(module: Any, i: int, name: str) -> nn.ModuleList:
    lists = getattr(module, name, None)
    n = module.res_specs[i].n_strata - 1
    if not isinstance(lists, nn.ModuleList) or len(lists) <= i or len(cast(Any, lists[i])) != n:
        raise NotDetected(f"has {name!r} without {n!r} layers at resolution {i!r}")
    return cast(nn.ModuleList, lists[i])
