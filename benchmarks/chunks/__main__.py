"""Chunks of any module in inference and in training: bytes, seconds and differences beside eager and beside others.

    python -m benchmarks.chunks [--quick] [--only budgets fused ...] [--picture docs/reports/chunks.png]

After Figures 1 and 5 of AutoChunk (Zhao et al. 2024), on small models of the same kinds, and in training:

    budgets     shares of eager's bytes
    fused       chunks on top of attention in one kernel
    lengths     the longest input within eager's bytes; --picture draws it
    caps        fixed caps of AutoChunk's tests, and the least bytes
    training    forward and backward pass of whole modules, beside what else lowers the peak
    promises    random budgets: bytes predicted and taken
    plan_time   seconds to plan deep models

Bytes are exact; times are medians of 5 rounds in turns on one thread. The tables are those of docs/reports/chunks.md,
printed. About 15 minutes on a quiet core, with --quick one.
"""

import argparse
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lightning_amp
from benchmarks.any_module.__main__ import available
from benchmarks.chunks.kinds import EXAMPLES, MODELS, example_loss
from benchmarks.chunks.lengths import least_bytes, lengths
from benchmarks.chunks.measure import count, counted, forward, largest_difference, seconds
from benchmarks.chunks.models import GPT, Fused, ViT
from benchmarks.chunks.training import plan_time, promises, training
from benchmarks.page import origin, paragraph, table
from lightning_amp.errors import AmpError
from lightning_amp.quantities import format_bytes, format_seconds
from tests.any_module import load

SHARES = (0.5, 0.2)
CAPS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor], tuple[float, ...]]] = {
    "GPT, 512 words, width 96, 4 heads, 2 layers":
        (lambda: GPT(96, 2, heads=4), lambda: torch.randint(1000, (1, 512)), (8, 6)),
    "ViT, 384 x 384 in patches of 16, width 1024, 16 heads, 2 of its 24 layers":
        (lambda: ViT(1024, 2, patch=16, heads=16), lambda: torch.randn(1, 3, 384, 384), (40, 32)),
    "U-Net with attention, 64 x 64, 224 channels":
        (lambda: load("unet").UNet(channels=224), lambda: torch.randn(1, 3, 64, 64), (300, 150)),
    "Evoformer, 64 x 64 pairs, width 128, 4 heads":
        (lambda: load("evoformer").Block(128, 4), lambda: torch.randn(1, 64, 64, 128), (24, 20)),
}  # fmt: skip
"""Models of the kinds of AutoChunk's tests, one input, and caps of those tests in MB."""


def chunked(module: nn.Module, args: tuple[Any, ...], budget: int) -> tuple[nn.Module | None, str, float]:
    """A module under a budget, or why there is none; and the seconds of planning."""
    begin = time.perf_counter()
    try:
        return lightning_amp.chunk(module, *args, budget=budget), "", time.perf_counter() - begin
    except AmpError as error:
        return None, str(error), time.perf_counter() - begin


def budgets(*, quick: bool) -> Iterator[str]:
    """All models under shares of eager's bytes."""
    rows = list[list[str]]()
    for model in MODELS[: 1 if quick else None]:
        length = model.quick_length if quick else model.length
        rows += under_shares(f"{model.name}, {length}", model.build(), model.args(length))
    for name in available(["wide_mlp"] if quick else list(EXAMPLES)):
        rows += under_shares(name, *example_loss(name, **({} if quick else EXAMPLES[name])))
    header = ["model", "budget", "bytes", "of eager", "operators", "FLOP", "time", "difference", "planned in"]
    yield from table(header, rows)


def under_shares(name: str, module: nn.Module, args: tuple[Any, ...]) -> Iterator[list[str]]:
    """Rows of one model: eager, and every share."""
    eager = forward(module, args)
    whole, operators, flop = count(eager)
    forms = {share: chunked(module, args, int(share * whole)) for share in SHARES}
    runs = {share: forward(form, args) for share, (form, *_) in forms.items() if form is not None}
    first, *ratios = seconds([eager, *runs.values()])
    times, right = dict(zip(runs, ratios, strict=True)), eager()
    yield [name, "eager", format_bytes(whole), "", f"{operators:,}", f"{flop:.3g}", format_seconds(first), "", ""]
    for share, (_, _, planned) in forms.items():
        if share not in runs:
            yield ["", f"{share:.0%}", f"{least_bytes(module, args) / whole:.0%} at least", *6 * [""]]
            continue
        n_bytes, operators = counted(runs[share])
        # hooks of the counter of FLOP make it a new call, which is checked once
        flop = [count(runs[share])[2] for _ in range(2)][-1]
        assert n_bytes <= share * whole, f"{name} takes {n_bytes} bytes of {share * whole:.0f}"
        yield ["", f"{share:.0%}", format_bytes(n_bytes), f"{n_bytes / whole:.1%}", f"{operators:,}", f"{flop:.3g}",
               f"{times[share] - 1:+.1%}", f"{largest_difference(right, runs[share]()):.1g}",
               format_seconds(planned)]  # fmt: skip


def fused(*, quick: bool) -> Iterator[str]:
    """Attention in one kernel first, and chunks on top of it, beside attention that is written out."""
    length = 512 if quick else 2048
    args = (torch.randint(1000, (1, length)),)
    torch.manual_seed(0)
    plain, one = GPT().eval(), GPT(kind=Fused).eval()
    one.load_state_dict(plain.state_dict())
    runs = {"attention in one kernel": forward(one, args), "attention written out": forward(plain, args)}
    alone, rows = counted(runs["attention in one kernel"])[0], list[list[str]]()
    for name, budget in (("chunks, 30 % of that", int(0.3 * alone)), ("chunks, the least", least_bytes(one, args))):
        form, refusal, _ = chunked(one, args, budget)
        if form is None:
            rows.append([f"one kernel and {name}", "", "", refusal])
        else:
            runs[f"one kernel and {name}"] = forward(form, args)
    first, *ratios = seconds(list(runs.values()))
    for name, ratio in zip(runs, [1.0, *ratios], strict=True):
        n_bytes = counted(runs[name])[0]
        change = ["", format_seconds(first)] if ratio == 1 else [f"{n_bytes / alone - 1:+.0%}", f"{ratio - 1:+.1%}"]
        rows.append([name, format_bytes(n_bytes), *change])
    yield from table([f"GPT prefill, {length}", "bytes", "difference", "time"], rows)


def caps(*, quick: bool) -> Iterator[str]:
    """Caps of AutoChunk's tests where they are below eager's bytes, and the least that can be met."""
    rows = list[list[str]]()
    for name, (make, draw, theirs) in list(CAPS.items())[: 1 if quick else None]:
        torch.manual_seed(0)
        module, args = make().eval(), (draw(),)
        eager = forward(module, args)
        whole, right, least = counted(eager)[0], eager(), least_bytes(module, args)
        asked = {f"{mb:g} MB": int(mb * 2**20) for mb in theirs if mb * 2**20 < whole}
        for label, budget in {**asked, "twice the least": 2 * least, "the least": least}.items():
            form, refusal, _ = chunked(module, args, budget)
            if form is None:
                rows.append([name, format_bytes(whole), label, f"not held: {refusal}", "", ""])
                continue
            n_bytes = counted(forward(form, args))[0]
            held = format_bytes(n_bytes) if n_bytes <= budget else f"NOT HELD: {format_bytes(n_bytes)}"
            same = torch.allclose(right, forward(form, args)(), atol=1e-4)
            rows.append([name, format_bytes(whole), label, held, f"{n_bytes / whole:.0%}", str(same)])
    yield from table(["model", "eager", "cap", "held with", "of eager", "allclose"], rows)


PARTS: dict[str, Callable[..., Iterator[str]]] = {
    "budgets": budgets,
    "fused": fused,
    "lengths": partial(lengths, None),
    "caps": caps,
    "training": training,
    "promises": promises,
    "plan_time": plan_time,
}


def main() -> None:
    """Print the tables that are asked for, as they come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short inputs, few modules")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="these tables")
    parser.add_argument("--picture", type=Path, help="file for the curves of `lengths`")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    parts = PARTS | {"lengths": partial(lengths, asked.picture)}
    print("\n".join(paragraph(origin(f"python -m benchmarks.chunks{' --quick' * asked.quick}"))))
    for name in asked.only:
        print(f"## {name}\n")
        for line in parts[name](quick=asked.quick):
            print(line, flush=True)


if __name__ == "__main__":
    main()
