"""Check that a key can run on some channels or rows only, and detect how far its attention reaches.

Under S5 and nodes a key's forward runs on a part of v. A copy of the key, whose children are replaced by stand-ins that
scale single numbers, must satisfy

    forward(v)[part] = forward(v[part])      and the same for spine, if there is one

Then only the children mix channels or rows, and the technique knows those. Keys that follow protocol.py pass.

The form of an attention key (stratum_keys.py) is detected in the same way. Attention reaches the neighbouring buckets
of anchors, or all anchors:

    declared     the attention, or a module inside it, has `reach`, "local" or "full"
    detected     it has the methods of bucketed attention; or it computes full attention on an example

Known limits: not detected are differences in gradients only, or for other numbers than those of the example, N(0, 1).
Legend: anchor (N), dim (D).
"""

import copy
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_amp.footprint.forward_overrides import hooked
from lightning_amp.shapes import PerAnchor
from lightning_amp.techniques.checks.same_function import close, failure, mismatch, outcome
from lightning_amp.techniques.contract.change import hooks_within
from lightning_amp.techniques.contract.protocol import ATTENTION_KEY, BucketedAttention

Index = tuple[slice | list[int], ...]
"""Index into v."""

RTOL = 1e-9
ROWS = 7


def channels_problem(key: nn.Module, dim: int, *ranks: list[int]) -> str:
    """Describe why a key cannot run on only the channels of some ranks; "" if it can.

    Args:
        key: Has the children of ATTENTION_KEY or CONVOLUTION_KEY.
        dim: D.
        ranks: Channels of every rank that is tested; equal on all ranks, so that all get the same result.
    """
    return _why_not_our_key(key, dim, "channels", [(slice(None), channels) for channels in ranks])


def rows_problem(key: nn.Module, dim: int) -> str:
    """Describe why a key with attention cannot run on some anchors only, except in its attention; "" if it can."""
    # both halves: a key that sums preceding rows would not change the first half
    half = ROWS // 2
    return _why_not_our_key(key, dim, "anchors", [(slice(half),), (slice(half, None),)])


@torch.no_grad()
def attention_form(key: nn.Module) -> tuple[bool, bool] | None:
    """Whether an attention key attends to its projected anchors, and whether it adds its gated layer to its input.

    Returns None if it has none of the four forms, or has hooks.
    """
    if set(key._modules) != set(ATTENTION_KEY) or hooked([key]):
        return None
    alone: Any = _alone(key)
    v = torch.randn(ROWS, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu")
    with warnings.catch_warnings(action="ignore"):
        # the forms are computed first, so that only the key's forward runs inside `try`
        expected = {}
        p = alone.prenorm(v)
        qk, val = alone.qk(p), alone.value(p)
        for projected, residual in product((False, True), repeat=2):
            met = val + alone.attention(qk, qk, val if projected else p)
            a, b = alone.ff(alone.postnorm(met)).chunk(2, dim=-1)
            gated = a * F.gelu(b)
            expected[projected, residual] = (met + gated if residual else gated, val)
        try:
            found = _tensors(alone(v))
        except Exception:
            return None
    for form, right in expected.items():
        if len(found) == 2 and all(close(x, y, rtol=RTOL) for x, y in zip(found, right, strict=True)):
            return form
    return None


def _why_not_our_key(key: nn.Module, dim: int, things: str, parts: Sequence[Index]) -> str:
    if hooks := hooked([key]):
        return f"has {hooks!r}, which would see a part of its values"
    alone = _alone(key)
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(ROWS, dim, generator=generator, dtype=torch.float64, device="cpu")
    for name in ("forward", "spine"):
        run = getattr(alone, name, None)
        try:
            with warnings.catch_warnings(action="ignore"):
                keeps = run is None or all(_keeps_parts(run, v, part) for part in parts)
        except Exception as error:
            return f"has a {name!r} that fails on an example, with stand-ins for its children, with {failure(error)}"
        if not keeps:
            return f"has a {name!r} that returns other values for some of the {things} than for all of them"
    return ""


@torch.no_grad()
def _keeps_parts(run: Callable[[Tensor], Any], v: PerAnchor, part: Index) -> bool:
    """Whether the result for a part equals the part of the full result."""
    expected = [whole[part] for whole in _tensors(run(v))]
    found = _tensors(run(v[part]))
    return len(found) == len(expected) and all(close(x, y, rtol=RTOL) for x, y in zip(found, expected, strict=True))


def _tensors(made: Any) -> tuple[Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)


def _alone(key: nn.Module) -> nn.Module:
    """Copy a key in training mode, so that dropout shows, with stand-ins for its children, which do not change."""
    # a shallow copy: stand-ins are set on the copy only, and parameters are not copied
    alone = copy.copy(key)
    stand_ins = ATTENTION if "attention" in key._modules else {"pairs": partial(_pairs, cast(nn.Conv1d, key.pairs))}
    # nn.Identity is kept, because a key may check for it; elementwise activations are kept too
    kept = {n: child for n, child in key._modules.items() if n not in stand_ins or type(child) is nn.Identity}
    replaced = {name: function for name, function in stand_ins.items() if name not in kept}
    vars(alone).update(replaced, _modules=kept, training=True)
    # an override of a technique would run the key itself
    vars(alone).pop("forward", None)
    return alone


# different factors: with equal ones two forms of a key would return the same
ATTENTION: dict[str, Callable[..., Tensor]] = {
    "prenorm": lambda x: 0.9 * x,
    "qk": lambda x: 1.1 * x,
    "value": lambda x: 1.3 * x,
    "attention": lambda q, k, values: 0.5 * q + 0.7 * k - 0.6 * values,
    "postnorm": lambda x: 1.7 * x,
    "ff": lambda x: torch.cat((0.8 * x, -1.2 * x), dim=-1),
}


def _pairs(layer: nn.Conv1d, x: Tensor) -> Tensor:
    # the same kernel for every channel
    taps = torch.linspace(1, 2, layer.kernel_size[0], dtype=x.dtype, device=x.device)
    kernel = taps.expand(x.shape[-2], 1, -1)
    return F.conv1d(x, kernel, None, layer.stride, layer.padding, layer.dilation, groups=x.shape[-2])


CLOSE = 1e-10


class Reach(NamedTuple):
    """Reach of attention.

    Attributes:
        full: Whether it reaches all anchors; otherwise the neighbouring buckets.
        known_from: How that was determined, as part of a sentence.
    """

    full: bool
    known_from: str


def reach_of(attention: nn.Module) -> Reach:
    """Return the reach of a key's attention: declared, or detected."""
    for part in attention.modules():
        kind, declared = type(part).__name__, getattr(part, "reach", None)
        if declared in ("local", "full"):
            return Reach(declared == "full", f"declared by {kind}")
        if isinstance(part, BucketedAttention):
            return Reach(False, f"detected: {kind} has buckets of anchors")
    kind = type(attention).__name__
    if not full_problem(attention):
        return Reach(True, f"detected: {kind} computes softmax(q k^T D^-0.5) values on an example")
    return Reach(False, f"taken as local: {kind} declares no `reach`, has no buckets and is no full attention")


def full_problem(attention: nn.Module) -> str:
    """Describe why a module is not full attention as torch defines it, with one head, without mask; "" if it is."""
    hooks = hooks_within(attention)
    if hooks:
        return f"has {hooks!r}, which would not run"
    expected = attention_results(lambda q, k, values: (q @ k.T / q.shape[1] ** 0.5).softmax(-1) @ values)
    return mismatch(attention, expected, attention_results, rtol=CLOSE)


def attention_results(attention: Callable[..., Tensor], n: int = 7, dim: int = 4) -> dict[str, Tensor | None]:
    """Return output and gradients in float64 for random anchors [n, dim], the same in every call."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn((3, n, dim), dtype=torch.float64, generator=generator, device="cpu")
    leaves = {name: draw.clone().requires_grad_() for name, draw in zip(("q", "k", "values"), draws, strict=True)}
    with torch.enable_grad():
        return outcome({"output": attention(*leaves.values())}, leaves, generator)
