"""Measure bytes and time of AutoChunk's models in chunks: inference, training, and an Evoformer block cut by hand.

Shares are of what the model takes beyond parameters and arguments, by the meter. The measured bytes are the peak of
torch's allocator, so they include workspaces of cuDNN, which multiplies in TF32 by default. Times are medians of rounds
that run eager and chunks in turn, each call until the device is done.
"""

import copy
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import lightning_amp
from benchmarks.chunks.autochunk import LENGTHS, run_bytes
from benchmarks.chunks.measure import Pass, both_passes, forward, largest_difference, seconds
from benchmarks.chunks.models import Language
from benchmarks.chunks.paper_models import KINDS, ROWS, evoformer, table_args
from benchmarks.gpu.device import Allocated, free_bytes, seconds_of
from benchmarks.gpu.runner import Work, first_line
from lightning_amp.errors import AmpError
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.techniques.chunk.run.in_chunks import InChunks

SHARES, FUSED_SHARES, TRAINED_SHARES = (0.5, 0.4, 0.2), (0.5,), (0.25,)
ALLOWED = 1e-3
"""Largest difference of float32 results, relative to the largest value."""


class SquareLoss(nn.Module):
    """The mean square of a module's results."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Tensor) -> Tensor:
        """The loss."""
        found = self.module(*args)
        return sum(one.square().mean() for one in (found if isinstance(found, tuple) else (found,)))  # type: ignore


def run(work: Work) -> None:
    """The four models at shares of their bytes, written out and with attention in one kernel; then training."""
    size, wrong = "small" if work.tiny else "paper", list[str]()
    for name, kind in KINDS.items():
        for fused in (False, True):
            title = f"{name}{', fused' if fused else ''}"
            torch.manual_seed(0)
            module, args = _there(work, kind.make(fused, size).eval(), kind.args(size))
            # on the device, where attention in one kernel is another operator than on a CPU
            n_bytes = _counted(forward(module, args))
            for share in FUSED_SHARES if fused or work.tiny else SHARES:
                for policy in ("auto",) if fused or work.tiny else ("auto", "paper"):
                    wrong += _inference(work, title, module, args, policy, share, n_bytes)
            del module, args
    _by_hand(work)
    for name, module, args in _trained(work, size):
        for share in TRAINED_SHARES:
            wrong += _training(work, name, module, args, share)
    if wrong:
        raise AssertionError(f"{wrong!r} failed, or differ by more than {ALLOWED}")


def _there(work: Work, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[nn.Module, tuple[Tensor, ...]]:
    free_bytes(work.device)
    return module.to(work.device), tuple(arg.to(work.device) for arg in args)


def _inference(
    work: Work, name: str, module: nn.Module, args: tuple[Tensor, ...], policy: str, share: float, n_bytes: int
) -> list[str]:
    row = {"model": name, "policy": policy, "budget": f"{share:.0%}"}
    if not work.has_time(f"{name} at {share:.0%}", 4):
        return []
    begun = time.perf_counter()
    try:
        small = lightning_amp.chunk(module, *args, budget=int(share * n_bytes), policy=policy)
        planned = time.perf_counter() - begun
        eager, chunked = forward(module, args), forward(small, args)
        difference = largest_difference(eager(), chunked())
        measured = _peak(work, eager), _peak(work, chunked)
        own, times = _ratio(work, eager, chunked)
    except (AmpError, torch.OutOfMemoryError) as error:
        work.record.note(f"{name}, {policy}, {share:.0%}: {first_line(error)}")
        return []
    except Exception as error:
        work.record.note(f"{name}, {policy}, {share:.0%}: **failed**, {first_line(error)}")
        return [name]
    plan: Any = small.plan
    work.record.row(**row, eager_counted_bytes=n_bytes, eager_bytes=measured[0], predicted_bytes=plan.peak_bytes,
                    chunks_bytes=measured[1], share_of_eager=measured[1] / measured[0], eager_seconds=own,
                    throughput=f"{1 / times - 1:+.1%}",
                    difference=difference, planned_seconds=planned)  # fmt: skip
    return [] if difference <= ALLOWED else [name]


def _by_hand(work: Work) -> None:
    """An Evoformer block with an expert's chunks, next to ours within the same bytes."""
    size = "small" if work.tiny else "paper"
    for side in (24,) if work.tiny else LENGTHS:
        torch.manual_seed(0)
        module, args = _there(work, evoformer(False, size).eval(), table_args(size, side=side))
        for rows in (1, ROWS):
            if not work.has_time(f"an expert's chunks at length {side}", 5):
                return
            hand: Any = copy.copy(module)
            hand.rows = rows
            theirs = forward(hand, args)
            n_bytes = run_bytes(partial(evoformer, False, size, rows), partial(table_args, size, side=side))
            try:
                small = lightning_amp.chunk(module, *args, budget=n_bytes)
            except AmpError as error:
                work.record.note(f"Evoformer at length {side} within an expert's {rows} rows: {first_line(error)}")
                continue
            ours = forward(small, args)
            found = _peak(work, theirs), _peak(work, ours)
            own, times = _ratio(work, theirs, ours)
            work.record.row(length=side, rows=rows, expert_bytes=found[0], ours_bytes=found[1], expert_seconds=own,
                            faster=f"{1 / times - 1:+.1%}")  # fmt: skip


def _trained(work: Work, size: str) -> Sequence[tuple[str, nn.Module, tuple[Tensor, ...]]]:
    tiny = work.tiny
    words = (torch.randint(1000, (1, 64 if tiny else 2048)),)
    tables = table_args(size, **({"side": 24} if tiny else {"side": 256}))
    return (
        ("GPT with its loss", Language(64 if tiny else 768, 2), words),
        ("Evoformer", SquareLoss(evoformer(False, size)), tables),
        ("U-Net", SquareLoss(KINDS["U-Net"].make(True, size)), KINDS["U-Net"].args(size)),
    )


def _training(work: Work, name: str, module: nn.Module, args: tuple[Tensor, ...], share: float) -> list[str]:
    if not work.has_time(f"training {name} at {share:.0%}", 12):
        return []
    module, args = _there(work, module, args)
    eager = both_passes(module, args)
    eager()
    module.zero_grad()
    n_bytes = _counted(eager)
    right = {key: p.grad.clone() for key, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    small = copy.deepcopy(module)
    runner, begun = InChunks(int(share * n_bytes), train=True), time.perf_counter()
    small.forward = partial(runner, small)
    try:
        planned = runner.planned(small, args, {}).chunks
        took = time.perf_counter() - begun
        chunked = both_passes(small, args)
        chunked()
        grads = {key: p.grad for key, p in small.named_parameters() if p.grad is not None}
        # a bias in front of a softmax has a gradient of zero, so all are compared with the largest
        largest = max(float(v.abs().max()) for v in right.values())
        difference = max(float((grads[k] - v).abs().max()) for k, v in right.items()) / largest
        small.zero_grad()
        measured = _peak(work, eager, module), _peak(work, chunked, small)
        own, times = _ratio(work, eager, chunked)
    except AmpError as error:
        work.record.note(f"training {name}, {share:.0%}: {first_line(error)}")
        return []
    work.record.row(trained=name, budget=f"{share:.0%}", eager_counted_bytes=n_bytes, eager_bytes=measured[0],
                    predicted_bytes=planned.peak_bytes, chunks_bytes=measured[1],
                    share_of_eager=measured[1] / measured[0], eager_seconds=own, time=f"{times - 1:+.1%}",
                    difference=difference, planned_seconds=took)  # fmt: skip
    return [] if difference <= ALLOWED else [name]


def _counted(run: Pass) -> int:
    # a counter of FLOP next to the meter would keep tensors
    with LiveBytes() as live:
        run()
    return int(live.peak)


def _peak(work: Work, run: Pass, trained: nn.Module | None = None) -> int:
    """Most bytes of torch's allocator beyond what is there without gradients."""
    # the first pass makes what stays, such as workspaces
    run()
    if trained is not None:
        trained.zero_grad()
    return Allocated(work.device).peak_of(run, ())


def _ratio(work: Work, first: Pass, second: Pass) -> tuple[float, float]:
    """Median seconds of the first, and how many times as long the second takes in the same round."""
    own, times = seconds([partial(seconds_of, one, work.device) for one in (first, second)])
    return own, times
