"""Detect a decoder of HiGLUE's shape, and build our decoder from its layers.

    feature_masks, strata_masks                 lists of indices, one per stratum
    scale_lin, bias                             tables [experiment, feature]
    log_theta, zi_logits                        the same, where the counts are not binary
    prenorm_layers, key_layers, value_layers,
    attn_layers, postnorm_layers, ff_layers     lists of modules, one per stratum; stratum 0 may be left out
    key_convs, key_conv_activations             the same, for keys by convolution
    strata_weights, strata_weight_head          optional
    use_attn, use_activation                    flags; if one is missing, both values are tried

`forward(u, v, b, l)` returns a distribution. Variants of this decoder combine these parts differently. A `Form` is one
variant; detect_form.py determines the form of an instance by computing, and does not trust flags.

Legend: anchor (N), dim (D), stratum (K), feature (F), experiment (row of the tables).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_amp.adapters.forms.adapted_decoder import (
    LISTS,
    AdaptedAttentionKey,
    AdaptedConvolutionKey,
    AdaptedDecoder,
    AdaptedStratum,
    GivenDistribution,
    Layout,
    NotDetected,
    read_layout,
)
from lightning_amp.models.decoders.stratum import ZINB
from lightning_amp.models.decoders.stratum_keys import LocalAttention

TABLE = "scale_lin"
BINARY_TABLES = {"scale": TABLE, "bias": "bias"}
COUNT_TABLES = BINARY_TABLES | {"log_theta": "log_theta", "zi_logits": "zi_logits"}
S = TypeVar("S", bound=AdaptedStratum)
TABLES = (*COUNT_TABLES.values(), "ber_logits")
ATTENTION_LISTS = {
    "prenorm": "prenorm_layers",
    "qk": "key_layers",
    "value": "value_layers",
    "attention": "attn_layers",
    "postnorm": "postnorm_layers",
    "ff": "ff_layers",
}
CONVOLUTION_LISTS = {"pairs": "key_convs", "activation": "key_conv_activations"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """Variant of the computation with a decoder's parts."""

    attention: bool = True  # keys by attention, else by convolution
    projected: bool = False  # attention reads `val`, else p
    residual: bool = True  # the feed-forward layer adds to its input
    postnorm: bool = True  # a LayerNorm comes before the feed-forward layer
    chained: bool = False  # the next stratum reads `val`
    activation: bool = False  # an activation follows the convolution
    normalised: bool = False  # without strata_weights: each stratum has the weight 1 / K, not 1
    least: float = 0.0
    kind: type = torch.distributions.Distribution
    ours: bool = False  # whether our equal likelihood is used, which supports sparse counts

    @property
    def binarized(self) -> bool:
        """Whether the form is for binary data."""
        return issubclass(self.kind, torch.distributions.Bernoulli)


def resembles(module: nn.Module, names: tuple[str, ...] = LISTS) -> bool:
    """Whether a module has `scale_lin` and all `names`, which no other kind of module would have by chance."""
    has_table = isinstance(getattr(module, TABLE, None), nn.Parameter)
    return has_table and all(hasattr(module, name) for name in names)


def lacks(module: nn.Module) -> list[str]:
    """Return the missing parts of a module that has at least half of them; empty if it has fewer, or all."""
    layers = (ATTENTION_LISTS["value"], CONVOLUTION_LISTS["pairs"])
    parts = {name: hasattr(module, name) for name in (*LISTS, TABLE)}
    parts[" or ".join(layers)] = any(hasattr(module, name) for name in layers)
    missing = [name for name, there in parts.items() if not there]
    return missing if 2 * len(missing) <= len(parts) else []


def read_parts(module: nn.Module) -> Layout:
    """Read the layout of a decoder; raises NotDetected if parts that all forms require are missing."""
    layout = read_layout(module)
    for name in BINARY_TABLES.values():
        table = getattr(module, name, None)
        if not isinstance(table, nn.Parameter) or table.dim() != 2 or table.shape[1] != layout.n_features:
            found = tuple(table.shape) if isinstance(table, nn.Parameter) else table
            raise NotDetected(f"has {name}={found!r}, and not a table of {layout.n_features!r} columns")
    if not (_has_lists(module, ATTENTION_LISTS) or _has_lists(module, CONVOLUTION_LISTS)):
        needed = tuple(ATTENTION_LISTS.values()), tuple(CONVOLUTION_LISTS.values())
        raise NotDetected(f"has neither the lists of layers {needed[0]!r} nor {needed[1]!r}")
    return layout


def forms(module: nn.Module, seen: Form) -> Iterator[Form]:
    """Yield the forms that a module's parts allow, the most likely first; `seen` gives `least` and `kind`."""
    # the order affects only time: the first form that agrees in value and gradients is used, and two forms that agree
    # everywhere are the same function
    both = (True, False)
    # with one layer, chained and unchained forms are equal
    chained = (False, True) if len(getattr(module, "value_layers", ())) > 1 else (False,)
    attention = [a for a in _flag(module, "use_attn") if _has_lists(module, _lists(a))]
    weights = (False,) if isinstance(getattr(module, "strata_weights", None), nn.Parameter) else both
    ours = (False,) if seen.binarized else both
    postnorm = both if hasattr(module, "postnorm_layers") else (False,)
    for by_attention, normalised in product(attention, weights):
        if by_attention:
            ways_of_keys = product((False, True), (True, False), postnorm)
            names = ("projected", "residual", "postnorm")
            forms_of_keys = [dict(zip(names, way, strict=True)) for way in ways_of_keys]
        else:
            forms_of_keys = [{"activation": activation} for activation in _flag(module, "use_activation")]
        ways = product(forms_of_keys, chained if by_attention else (False,))
        for (keys, chain), own in product(ways, ours):
            found = replace(seen, attention=by_attention, chained=chain, normalised=normalised, ours=own)
            yield replace(found, **keys)  # type: ignore[arg-type]


def make_decoder(module: Any, layout: Layout, form: Form) -> AdaptedDecoder:
    """Build our decoder from a module's layers and tables."""
    n_strata = len(layout.nodes)
    strata = [
        make_stratum(
            AdaptedStratum,
            module,
            _key(module, k, n_strata, form),
            layout.nodes[k],
            layout.columns[k],
            form,
            chained=form.chained and form.attention and k > 0,
        )
        for k in range(n_strata)
    ]
    # keys by convolution have no buckets: anchors can be sharded anywhere
    windows = {layer.window_size for layer in module.attn_layers} if form.attention else {1}
    head = getattr(module, "strata_weight_head", None)
    weights = getattr(module, "strata_weights", None)
    return AdaptedDecoder(
        strata,
        layout,
        dim=dim_of(module),
        window=max(windows, default=1),
        variant="higlue" if form.postnorm else "paper",
        strata_weights=weights if isinstance(weights, nn.Parameter) else None,
        head=head if isinstance(head, nn.Linear) else None,
        normalised=form.normalised,
        kind=form.kind,
    )


def make_stratum(
    kind: type[S],
    module: Any,
    key: nn.Module | None,
    nodes: Tensor,
    columns: tuple[int, int],
    form: Form,
    *,
    chained: bool = False,
) -> S:
    """Build our stratum with a foreign decoder's tables."""
    tables = BINARY_TABLES if form.binarized else COUNT_TABLES
    return kind(
        key,
        nodes.to(module.scale_lin.device),
        columns=columns,
        tables={name: _table(module, foreign) for name, foreign in tables.items()},
        likelihood=ZINB() if form.ours else GivenDistribution(form.kind),
        chained=chained,
        least=form.least,
    )


def dim_of(module: Any) -> int:
    """Return D from the first layer, for one or several resolutions."""
    several: Any = getattr(module, "key_convs_by_res", None) or ()
    lists = (getattr(module, "value_layers", None), getattr(module, "key_convs", None), *several)
    layer: Any = next((layers[0] for layers in lists if layers), None)
    if layer is None:
        raise NotDetected("has one stratum only, which is the anchors themselves")
    return int(getattr(layer, "in_features", None) or layer.in_channels)


def _key(module: Any, k: int, n_strata: int, form: Form) -> nn.Module | None:
    """Build the key of stratum k; None for first strata without layers."""
    lists = {name: getattr(module, foreign, None) for name, foreign in _lists(form.attention).items()}
    lengths = {len(layers) for layers in lists.values() if layers is not None}
    # stratum 0 may have no layers, because its keys are the anchors
    if len(lengths) != 1 or n_strata - max(lengths) not in (0, 1):
        raise NotDetected(f"has {n_strata!r} strata and lists of {sorted(lengths)!r} layers")
    place = k - n_strata + lengths.pop()
    if k == 0:
        return None
    layers: dict[str, Any] = {name: found[place] for name, found in lists.items() if found is not None}
    if not form.attention:
        pairs = layers["pairs"]
        if not isinstance(pairs, nn.Conv1d):
            raise NotDetected(f"has key_convs of the type {type(pairs).__name__!r}")
        return AdaptedConvolutionKey(
            pairs,
            layers["activation"] if form.activation else nn.Identity(),
            padding=0 if pairs.padding == "same" else pairs.dilation[0],
        )
    layers["attention"] = LocalAttention(dim_of(module), layers["attention"].window_size)
    if not form.postnorm:
        layers["postnorm"] = nn.Identity()
    return AdaptedAttentionKey(layers, projected=form.projected, residual=form.residual)


def _table(module: nn.Module, name: str) -> nn.Parameter:
    table, like = getattr(module, name, None), getattr(module, "scale_lin", None)
    if not isinstance(table, nn.Parameter) or not isinstance(like, nn.Parameter) or table.shape != like.shape:
        raise NotDetected(f"has no table {name!r} of the size of 'scale_lin'")
    return table


def _lists(attention: bool) -> dict[str, str]:
    return ATTENTION_LISTS if attention else CONVOLUTION_LISTS


def _has_lists(module: nn.Module, lists: dict[str, str]) -> bool:
    needed = [name for name in lists.values() if name not in ("postnorm_layers", "key_conv_activations")]
    return all(isinstance(getattr(module, name, None), nn.ModuleList) for name in needed)


def _flag(module: nn.Module, name: str) -> tuple[bool, ...]:
    value = getattr(module, name, None)
    return (True, False) if value is None else (bool(value),)
