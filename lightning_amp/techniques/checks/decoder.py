"""Check that the parts of a decoder compute what techniques require: its child `walk`, and a stratum's `decode`.

S4 and S5 replace or split what `decode` computes, stream and strata replace the loop over strata; recompute
relies on it.

    decode(u, key, feature_anchor)                         (u key^T)[:, feature_anchor]
    walk(strata, u, v, log_weights, own=..., **cells)      negative log-likelihood of the own strata, all if None
    stratum.arguments(k, log_weights, **cells)             arguments of a stratum in addition to v and u
    stratum.spine(v)                                       only v for the next stratum

Known limit: `decode` is tried on a few scores of both signs, from 1e-6 to 1e5; what it does with others is not seen.
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
"""Of the examples; powers of two keep products exact."""


def decode_problem(decode: nn.Module) -> str:
    """Why a module is not (u key^T)[:, feature_anchor], of all channels or summed over parts of them; "" if it is."""
    # small integers are exact in any order of summation: a difference is a different function
    key, feature_anchor = torch.arange(10.0).view(5, 2), torch.tensor([3, 0, 3, 1])

    def run(decode: nn.Module, u: Tensor) -> dict[str, Tensor]:
        # S5 adds up what ranks compute of their channels: a decode that is not linear in them is right for all of them
        # alone
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
    """The child `walk` of a decoder, checked.

    Args:
        stacked: Whether a loop that another technique has put there will do.
        once: Whether a stratum has to run once, on all cells, to compute what it should.

    Raises:
        InstallError: A technique could not stand in for the decoder's strata loop.
    """
    walk = getattr(decoder, "walk", None)
    if not isinstance(walk, nn.Module):
        problem = f"is {shown(walk)}"
    elif getattr(walk, "is_technique", False):
        problem = "" if stacked else f"is {type(walk).__name__!r}, which another technique has put there"
    else:
        # strata add 1 to v along the spine and return v + k, which of all is 1 + 0, 2 + 1, 3 + 2 and 4 + 3
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
    # its power iteration changes a buffer in every pass that trains
    spectral = any("SpectralNorm" in type(one).__name__ for one in (part, *hooks))
    return isinstance(part, AnyBatchNorm) or keeps or spectral


class _ExampleStratum(nn.Module):
    """A stratum with v + k for a loss and v + 1 for the next one."""

    def arguments(self, k: int, log_weights: Tensor, **cells: Any) -> dict[str, Any]:
        return {"k": k}

    def spine(self, v: Tensor) -> Tensor:
        return v + 1

    def forward(self, v: Tensor, u: Tensor, *, k: int) -> tuple[Tensor, Tensor]:
        return v.sum() + k, v + 1
