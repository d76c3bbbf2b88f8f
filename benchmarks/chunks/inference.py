"""`lightning_amp.chunk` under budgets, beside eager and beside fused attention; and the caps of AutoChunk's tests."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import lightning_amp
from benchmarks.chunks.measure import Pass, count, forward, largest_difference, seconds
from benchmarks.chunks.models import EXAMPLES, GPT, MODELS, Fused, ViT, build_example, example
from benchmarks.page import table
from lightning_amp.errors import AmpError
from lightning_amp.progress import track
from lightning_amp.quantities import format_bytes, format_seconds

SHARES = (0.5, 0.2)
HEADER = [
    "model",
    "budget",
    "bytes",
    "of eager",
    "operators",
    "FLOP",
    "time",
    "difference",
    "planned in",
]


@dataclass(frozen=True, slots=True)
class Form:
    """A module under a budget, or why there is none."""

    budget: int
    label: str
    run: Pass | None
    refusal: str
    planned_s: float


def budgets(*, quick: bool) -> Iterator[str]:
    """The table: all models under all shares of eager's bytes."""
    yield from table(HEADER, all_rows(quick=quick))


def all_rows(*, quick: bool) -> Iterator[list[str]]:
    """Those of the four kinds of model, then those of the examples."""
    for model in track(MODELS, description="budgets", total=len(MODELS)):
        length = model.quick_length if quick else model.length
        yield from rows_of(f"{model.name}, {length}", model.build(), model.args(length))
    for name in track(EXAMPLES, description="example modules", total=len(EXAMPLES)):
        try:
            yield from rows_of(name, *build_example(name, quick=quick))
        except ImportError as error:
            yield [name, f"not measured: {error}", *7 * [""]]


def rows_of(name: str, module: nn.Module, args: tuple[Any, ...]) -> list[list[str]]:
    """Eager and every budget."""
    eager = forward(module, args)
    whole, operators, flop = count(eager)
    least = least_bytes(module, args)
    asked = [(f"{share:.0%}", int(share * whole)) for share in SHARES]
    forms = [form(module, args, label, n_bytes) for label, n_bytes in asked]
    first, *shares = seconds([eager, *(f.run for f in forms if f.run)])
    rows = [[name, "eager", format_bytes(whole), "", f"{operators:,}", f"{flop:.3g}",
             format_seconds(first), "", ""]]  # fmt: skip
    times, right = iter(shares), eager()
    for found in forms:
        if found.run is None:
            rows.append(["", found.label, f"{least / whole:.0%} at least", *6 * [""]])
            continue
        n_bytes, operators, flop = count(found.run)
        assert n_bytes <= found.budget, f"{name} takes {n_bytes} bytes of {found.budget}"
        rows.append(["", found.label, format_bytes(n_bytes), f"{n_bytes / whole:.1%}", f"{operators:,}", f"{flop:.3g}",
                     f"{next(times) - 1:+.1%}", f"{largest_difference(right, found.run()):.1g}",
                     format_seconds(found.planned_s)])  # fmt: skip
    return rows


def form(module: nn.Module, args: tuple[Any, ...], label: str, budget: int) -> Form:
    """Plan a module for a budget."""
    begin = time.perf_counter()
    try:
        small = lightning_amp.chunk(module, *args, budget=budget)
    except AmpError as error:
        return Form(budget, label, None, str(error), time.perf_counter() - begin)
    return Form(budget, label, forward(small, args), "", time.perf_counter() - begin)


def least_bytes(module: nn.Module, args: tuple[Any, ...]) -> int:
    """The least budget that can be met."""
    try:
        return int(lightning_amp.chunk(module, *args, budget=1).plan.peak_bytes)  # type: ignore[union-attr]
    except AmpError as error:
        found = getattr(error, "least_bytes", None)
        if found is None:
            raise
        return int(found)


@dataclass(frozen=True, slots=True)
class Cap:
    """A model of a kind of AutoChunk's tests, and the caps of those tests, in MB.

    Attributes:
        name: Kind and size.
        make: The model.
        args: Its arguments.
        theirs: Caps of theirs, on models of more parts.
    """

    name: str
    make: Callable[[], nn.Module]
    args: Callable[[], tuple[Tensor, ...]]
    theirs: tuple[float, ...]


CAPS = (
    Cap("GPT, 512 words, width 96, 4 heads, 2 layers",
        lambda: GPT(96, 2, heads=4), lambda: (torch.randint(1000, (1, 512)),), (8, 6)),
    Cap("ViT, 384 x 384 in patches of 16, width 1024, 16 heads, 2 of its 24 layers",
        lambda: ViT(1024, 2, patch=16, heads=16), lambda: (torch.randn(1, 3, 384, 384),), (40, 32)),
    Cap("U-Net with attention, 64 x 64, 224 channels",
        lambda: example("unet").UNet(channels=224), lambda: (torch.randn(1, 3, 64, 64),), (300, 150)),
    Cap("Evoformer, 64 x 64 pairs, width 128, 4 heads",
        lambda: example("evoformer").Block(128, 4), lambda: (torch.randn(1, 64, 64, 128),), (24, 20)),
)  # fmt: skip


def caps(*, quick: bool) -> Iterator[str]:
    """The table: whether caps are held, theirs where they are below eager's bytes, and the least that can be met."""
    header = ["model", "eager", "cap", "held with", "of eager", "allclose"]
    rows = []
    for cap in track(CAPS[: 1 if quick else None], description="fixed caps", total=1 if quick else len(CAPS)):
        torch.manual_seed(0)
        module, args = cap.make().eval(), cap.args()
        eager = forward(module, args)
        whole, right = count(eager)[0], eager()
        # a cap above eager's bytes asks for nothing
        asked = [(f"{mb:g} MB", int(mb * 2**20)) for mb in cap.theirs if mb * 2**20 < whole]
        least = least_bytes(module, args)
        asked += [("twice the least", 2 * least), ("the least", least)]
        for k, (label, budget) in enumerate(asked):
            start = [cap.name, format_bytes(whole)] if not k else ["", ""]
            found = form(module, args, label, budget)
            if found.run is None:
                rows.append([*start, label, f"not held: {found.refusal}", "", ""])
                continue
            n_bytes = count(found.run)[0]
            same = torch.allclose(right, found.run(), atol=1e-4)
            held = format_bytes(n_bytes) if n_bytes <= budget else f"NOT HELD: {format_bytes(n_bytes)}"
            rows.append([*start, label, held, f"{n_bytes / whole:.0%}", str(same)])
    yield from table(header, rows)


def fused(*, quick: bool) -> Iterator[str]:
    """The table: attention in one kernel first, and chunks on top of it, beside written-out attention."""
    length = 512 if quick else 2048
    args = (torch.randint(1000, (1, length)),)
    torch.manual_seed(0)
    plain, one = GPT().eval(), GPT(kind=Fused).eval()
    one.load_state_dict(plain.state_dict())
    written, kernel = forward(plain, args), forward(one, args)
    whole, alone = count(written)[0], count(kernel)[0]
    asked = [("chunks, 30 % of that", int(0.3 * alone)), ("chunks, the least", least_bytes(one, args))]
    forms = [form(one, args, label, n_bytes) for label, n_bytes in asked]
    base, *shares = seconds([kernel, written, *(f.run for f in forms if f.run)])
    times = iter(shares)
    rows = [["attention in one kernel", format_bytes(alone), "", format_seconds(base)],
            ["attention written out", format_bytes(whole), f"{whole / alone - 1:+.0%}",
             f"{next(times) - 1:+.1%}"]]  # fmt: skip
    for found in forms:
        if found.run is None:
            rows.append([found.label, "", "", found.refusal])
            continue
        n_bytes = count(found.run)[0]
        rows.append([f"one kernel and {found.label}", format_bytes(n_bytes), f"{n_bytes / alone - 1:+.0%}",
                     f"{next(times) - 1:+.1%}"])  # fmt: skip
    yield from table([f"GPT prefill, {length}", "bytes", "difference", "time"], rows)
