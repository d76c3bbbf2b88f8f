"""Check that the parts of a decoder compute what techniques require: its child `walk`, and a stratum's `decode`.

S4 and S5 replace or shard `decode`, stream and strata replace the loop over strata, on which recompute relies.

    decode(u, key, feature_anchor)                         (u key^T)[:, feature_anchor]
    walk(strata, u, v, log_weights, own=..., **cells)      negative log-likelihood of the strata `own`, all if None
    stratum.arguments(k, log_weights, **cells)             arguments of a stratum in addition to v and u
    stratum.spine(v)                                       only v for the next stratum

Known limit: `decode` is tested only on a few scores of both signs, from 1e-6 to 1e5.
"""

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_amp._torch import AnyBatchNorm
from lightning_amp.errors import InstallError
from lightning_amp.techniques.checks.same_function import mismatch, shown
from lightning_amp.techniques.contract.protocol import DecomposedDecoder

SCALES = (1.0, 2.0**-20, 2.0**13)
"""Scales of the examples; powers of two keep products exact."""


def decode_problem(decode: nn.Module) -> str:
    """Describe why a module is not (u key^T)[:, feature_anchor], also as a sum over channels; "" if it is."""
    # small integers are exact in any order of summation: a difference means a different function
    key, feature_anchor = torch.arange(10.0).view(5, 2), torch.tensor([3, 0, 3, 1])

    def run(decode: nn.Module, u: Tensor) -> dict[str, Tensor]:
        # S5 sums results of the ranks' channels: a decode that is not linear is right for all channels only
        parts = [decode(u[:, part], key[:, part], feature_anchor) for part in (slice(0, 1), slice(1, 2))]
        return {"": decode(u, key, feature_anchor), "the sum over channels": parts[0] + parts[1]}

    for scale in SCALES:
        u = scale * torch.tensor([[1.0, -2.0], [-3.0, 5.0]])
        expected = (u @ key.T)[:, feature_anchor]
        with torch.no_grad():
            if problem := mismatch(decode, {"": expected, "the sum over channels": expected}, partial(run, u=u)):
                return problem
    return ""


def walk_of(decoder: DecomposedDecoder, strategy: str, *, stacked: bool = False, once: bool = False) -> nn.Module:
    """Return the child `walk` of a decoder, after checks.

    Args:
        decoder: The decoder.
        strategy: Id of the technique, for messages.
        stacked: Whether a loop of another technique is supported.
        once: Whether strata must run once, on all cells, to compute correctly, so that some layers are not supported.

    Raises:
        InstallError: A technique could not replace the decoder's loop over strata.
    """
    walk = getattr(decoder, "walk", None)
    if not isinstance(walk, nn.Module):
        problem = f"is {shown(walk)}"
    elif getattr(walk, "is_technique", False):
        problem = "" if stacked else f"is {type(walk).__name__!r}, which another technique has put there"
    else:
        # strata add 1 to v and return v + k as loss: for all four 1 + 0, 2 + 1, 3 + 2 and 4 + 3
        problem = mismatch(walk, {"all strata": 16.0, "the inner ones": 8.0, "none": 0.0}, _run_walk)
    if problem:
        raise InstallError(
            f"{strategy} does not support {type(decoder).__name__!r}, whose child `walk` {problem}; only a"
            " module without state that adds up what its strata return, and hands each one's v to the next,"
            f" can be replaced: see docs/architecture.md, or leave {strategy} out"
        )
    counting = [name for name, part in decoder.strata.named_modules() if once and _sees_the_batch(part)]
    if counting:
        raise InstallError(
            f"{strategy} does not support {type(decoder).__name__!r}, whose strata have {counting[:3]!r},"
            " which read or keep something of the whole batch every time they run; strata run for some"
            f" cells at a time, or twice: move these to the encoders, or leave {strategy} out"
        )
    for k, stratum in enumerate(decoder.strata):
        missing = [name for name in ("arguments", "spine") if not callable(getattr(stratum, name, None))]
        if missing:
            raise InstallError(
                f"{strategy} does not support {type(decoder).__name__!r}, whose stratum {k!r} lacks"
                f" {missing!r}; add these methods (docs/architecture.md), or leave {strategy} out"
            )
    return cast(nn.Module, walk)


def _run_walk(walk: Any) -> dict[str, float]:
    one, strata = torch.ones(1, 1), nn.ModuleList(_ExampleStratum() for _ in range(4))
    runs = {"all strata": None, "the inner ones": range(1, 3), "none": range(2, 2)}
    return {name: float(walk(strata, one, one, one, own=own)) for name, own in runs.items()}


def _sees_the_batch(part: nn.Module) -> bool:
    keeps = isinstance(part, nn.modules.instancenorm._InstanceNorm) and part.track_running_stats
    hooks = part._forward_pre_hooks.values()
    # spectral norm changes a buffer in every forward pass in training mode
    spectral = any("SpectralNorm" in type(one).__name__ for one in (part, *hooks))
    return isinstance(part, AnyBatchNorm) or keeps or spectral


class _ExampleStratum(nn.Module):
    """A stratum with v + k as loss and v + 1 as the next v."""

    def arguments(self, k: int, log_weights: Tensor, **cells: Any) -> dict[str, Any]:
        return {"k": k}

    def spine(self, v: Tensor) -> Tensor:
        return v + 1

    def forward(self, v: Tensor, u: Tensor, *, k: int) -> tuple[Tensor, Tensor]:
        return v.sum() + k, v + 1
