"""List settings of a foreign decoder's attention that ours does not support, for the error message."""

from collections.abc import Iterator
from typing import Any

from torch import nn

OURS = {
    "causal": False,
    "look_backward": 1,
    "look_forward": 1,
    "exact_windowsize": False,
    "autopad": True,
    "shared_qk": True,
    "use_xpos": False,
    "scale": None,
}


def attention_layers(module: nn.Module) -> list[nn.Module]:
    """The layers of attention of a decoder, of all resolutions."""
    several: Any = getattr(module, "attn_layers_by_res", None) or ()
    return [*getattr(module, "attn_layers", ()), *(layer for layers in several for layer in layers)]


def settings_problem(module: nn.Module) -> str:
    """How the attention of a decoder differs from ours, as the end of a sentence; "" if it has no other settings."""
    layers = [] if getattr(module, "use_attn", True) is False else attention_layers(module)
    found = list(dict.fromkeys(text for layer in layers for text in _others(layer)))
    return f": its attention has {', '.join(found)}" if found else ""


def _others(layer: nn.Module) -> Iterator[str]:
    for name, ours in OURS.items():
        value = getattr(layer, name, ours)
        if value != ours:
            yield f"{name}={value!r} where ours has {ours!r}"
    dropout = getattr(getattr(layer, "dropout", None), "p", 0)
    if dropout:
        yield f"dropout={dropout!r} where ours has none"
    if getattr(layer, "rel_pos", layer) is None:
        yield "no rotary positions (`dim`, use_rotary_pos_emb) where ours has them"
