"""Seconds to plan deep models."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

import lightning_amp
from benchmarks.chunks.measure import count, forward
from benchmarks.chunks.models import GPT, Layer
from benchmarks.page import table
from lightning_amp.errors import PlanError
from lightning_amp.quantities import format_bytes, format_seconds
from lightning_amp.techniques.chunk.run.in_chunks import InChunks
from lightning_amp.techniques.chunk.run.planned import Planned


class Different(nn.Module):
    """Blocks of as many widths."""

    def __init__(self, n: int) -> None:
        super().__init__()
        widths = [32 + 8 * k for k in range(n)]
        self.layers = nn.ModuleList(Layer(width, 4, causal=True) for width in widths)
        pairs = zip([32, *widths], widths, strict=False)
        self.between = nn.ModuleList(nn.Linear(a, b) for a, b in pairs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for between, layer in zip(self.between, self.layers, strict=True):
            x = layer(between(x))
        return x


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "48 blocks, all equal": (lambda: GPT(64, 48), lambda: torch.randint(1000, (1, 256))),
    "12 blocks, all different": (lambda: Different(12), lambda: torch.randn(1, 256, 32)),
}


def plan_time(*, quick: bool) -> Iterator[str]:
    """The table."""
    header = [
        "model",
        "inference, half of eager's bytes",
        "planned in",
        "training, blocks in half",
        "planned in",
    ]
    rows = []
    for name, (make, args) in list(CASES.items())[1 if quick else 0 :]:
        torch.manual_seed(0)
        module, x = make().eval(), args()
        rows.append([name, *inference(module, x), *training(module, x)])
    yield from table(header, rows)


def inference(module: nn.Module, x: torch.Tensor) -> tuple[str, str]:
    """Bytes, and seconds of the plan."""
    whole = count(forward(module, (x,)))[0]
    begin = time.perf_counter()
    try:
        small = lightning_amp.chunk(module, x, budget=whole // 2)
    except PlanError as error:
        return str(error), format_seconds(time.perf_counter() - begin)
    planned = time.perf_counter() - begin
    found = count(forward(small, (x,)))[0]
    return f"{format_bytes(found)} of {format_bytes(whole)}", format_seconds(planned)


def training(module: nn.Module, x: torch.Tensor) -> tuple[str, str]:
    """Bytes of a step whose blocks are each given half of what they take, and seconds of all plans."""
    blocks, wholes = list(module.layers), dict[nn.Module, int]()  # type: ignore[arg-type]

    def note(block: nn.Module, args: tuple[torch.Tensor, ...], _: object) -> None:
        given = args[0].detach().requires_grad_()
        wholes[block] = count(lambda: type(block).forward(block, given).sum().backward())[0]  # type: ignore[operator]

    hooks = [block.register_forward_hook(note) for block in blocks]
    module(x)
    for hook in hooks:
        hook.remove()
    module.zero_grad(set_to_none=True)
    eager = count(lambda: module(x).sum().backward())[0]
    module.zero_grad(set_to_none=True)
    known: dict[Any, Planned] = {}
    for block in blocks:
        runner = InChunks(wholes[block] // 2, train=True)
        runner.known = known  # all blocks of a model have the same, as a plan installs them
        block.forward = partial(runner, block)
    first, second = (_seconds(lambda: module(x).sum().backward()) for _ in range(2))
    module.zero_grad(set_to_none=True)
    found = count(lambda: module(x).sum().backward())[0]
    return f"{format_bytes(found)} of {format_bytes(eager)}", format_seconds(first - second)


def _seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin
