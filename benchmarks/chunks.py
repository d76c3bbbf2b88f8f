"""Chunks of any module in inference: bytes and time at two budgets, and the longest input under a fixed one.

    python -m benchmarks.chunks [--quick] [--out docs/chunks.md]

After Zhao et al. 2024 (AutoChunk), Figures 5 and 1, on small models of the same kinds. Bytes are those of all live
tensors beyond parameters and arguments, by the library's meter; seconds are medians of 5 interleaved rounds, and tell
something on a machine that does nothing else. About 15 minutes on one quiet core; with --quick two minutes.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import lightning_amp
from benchmarks.chunk_models import MODELS, Model
from benchmarks.page import origin, paragraph, table
from lightning_amp.errors import PlanError
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.progress import track
from lightning_amp.quantities import format_bytes, format_seconds

SHARES = (0.5, 0.2)
ROUNDS = 5
STEP = {1: 64, 2: 16}
"""Lengths are tried in multiples of this, for inputs of one dimension and of two."""
MOST = {1: 16384, 2: 512}
"""Longest inputs that are tried."""


class Counter(LiveBytes):
    """The meter, and how many operators run."""

    n_operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n_operators += 1
        return super().__torch_dispatch__(func, types, args, kwargs)


def measure(module: nn.Module, args: tuple[Any, ...]) -> tuple[int, int, int]:
    """Bytes, operators and FLOP of one forward pass."""
    with torch.no_grad(), FlopCounterMode(display=False) as flops, Counter() as meter:
        module(*args)
    return meter.peak, meter.n_operators, int(flops.get_total_flops())


def seconds(forms: list[nn.Module], args: tuple[Any, ...]) -> list[float]:
    """Median time of each, in rounds that run all of them."""
    times: list[list[float]] = [[] for _ in forms]
    with torch.no_grad():
        for _ in range(ROUNDS + 1):
            for own, form in zip(times, forms, strict=True):
                begin = time.perf_counter()
                form(*args)
                own.append(time.perf_counter() - begin)
    # the first round warms up
    return [median(own[1:]) for own in times]


def budgets(model: Model, *, quick: bool) -> Iterator[list[str]]:
    """Rows of one model: eager, and every budget that can be met."""
    length = model.quick_length if quick else model.length
    module, args = model.build(), model.args(length)
    whole, operators, flop = measure(module, args)
    forms, found = [module], []
    for share in SHARES:
        begin = time.perf_counter()
        try:
            forms.append(lightning_amp.chunk(module, *args, budget=int(share * whole)))
        except PlanError as error:
            found.append((share, error))
            continue
        found.append((share, time.perf_counter() - begin))
    times = iter(seconds(forms, args))
    eager, rest = next(times), iter(forms[1:])
    yield [f"{model.name}, {length}", "eager", format_bytes(whole), "", f"{operators:,}", f"{flop:.3g}",
           format_seconds(eager), "", ""]  # fmt: skip
    for share, planned in found:
        if isinstance(planned, PlanError):
            yield ["", f"{share:.0%}", "", str(planned).partition(" and ")[2].partition(",")[0], *5 * [""]]
            continue
        form = next(rest)
        n_bytes, operators, flop = measure(form, args)
        error = max_difference(module, form, args)
        yield ["", f"{share:.0%}", format_bytes(n_bytes), f"{n_bytes / whole:.1%}", f"{operators:,}", f"{flop:.3g}",
               f"{next(times) / eager - 1:+.1%}", f"{error:.1g}", format_seconds(planned)]  # fmt: skip


def max_difference(module: nn.Module, form: nn.Module, args: tuple[Any, ...]) -> float:
    """Of the results, relative to the largest value."""
    with torch.no_grad():
        right, found = module(*args), form(*args)
    return float((found - right).abs().max() / right.abs().max())


def peak(model: Model, module: nn.Module, length: int, budget: int | None) -> int | None:
    """Bytes at a length: eager's with no budget, else those of the plan, None where there is none."""
    try:
        plan = lightning_amp.chunk(module, *model.args(length), budget=budget or 2**50).plan
    except PlanError:
        return None
    return int(plan.peak_bytes)


def longest(model: Model, module: nn.Module, budget: int, *, chunked: bool) -> int:
    """The longest input within a budget, by what the generated forward takes on fake tensors; in steps."""
    step, most = STEP[model.dims], MOST[model.dims]

    def fits(n: int) -> bool:
        found = peak(model, module, n * step, budget if chunked else None)
        return found is not None and found <= budget

    low, high = 1, 2
    while high * step <= most and fits(high):
        low, high = high, 2 * high
    if high * step > most:
        return low * step
    while high - low > max(1, low // 8):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * step


def lengths(model: Model, *, quick: bool) -> list[str]:
    """A row: the longest input that eager can take with what it takes now, and that of chunks."""
    module = model.build()
    n = model.quick_length if quick else model.length
    budget = peak(model, module, n, None)
    assert budget is not None, "no budget is always met"
    plain = longest(model, module, budget, chunked=False)
    chunked = longest(model, module, budget, chunked=True)
    return [model.name, format_bytes(budget), f"{plain:,}", f"{chunked:,}", f"{chunked / plain:.1f}x"]


def page(*, quick: bool, with_lengths: bool) -> Iterator[str]:
    """The document."""
    command = f"python -m benchmarks.chunks{' --quick' if quick else ''}"
    yield from ["# Chunks of any module", "", origin(command), ""]
    yield from paragraph(
        f"""`lightning_amp.chunk` at {SHARES[0]:.0%} and {SHARES[1]:.0%} of what eager's tensors take beyond parameters
        and arguments, in inference; attention is written out in all models. Bytes by the meter, seconds as medians of
        {ROUNDS} interleaved rounds, relative to eager; the difference is that of the largest value in float32."""
    )
    header = [
        "model, length",
        "budget",
        "bytes",
        "of eager",
        "operators",
        "FLOP",
        "time",
        "difference",
        "planned in",
    ]
    asked = track(MODELS, description="budgets", total=len(MODELS))
    yield from table(header, [row for model in asked for row in budgets(model, quick=quick)])
    if not with_lengths:
        return
    yield from paragraph(
        """The longest input within the bytes that eager takes at the length above, by the generated forward on fake
        tensors. (AutoChunk reports 11.7x for inputs of one dimension and 3.2x for two, on other models and a GPU.)"""
    )
    header = ["model", "budget", "eager", "chunks", "ratio"]
    asked = track(MODELS, description="lengths", total=len(MODELS))
    yield from table(header, [lengths(model, quick=quick) for model in asked])


def main() -> None:
    """Write the document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="short inputs")
    parser.add_argument("--no-lengths", action="store_true", help="without the longest inputs")
    parser.add_argument("--out", type=Path, default=Path("docs/chunks.md"), help="document to write")
    asked = parser.parse_args()
    text = list(page(quick=asked.quick, with_lengths=not asked.no_lengths))
    asked.out.write_text("\n".join(text).rstrip() + "\n")
    print(f"wrote {asked.out}")


if __name__ == "__main__":
    main()
