"""What compiling a model's blocks changes: bytes by torch's profiler, loss, gradients and random states in float64.

    python -m benchmarks.training.compiled_blocks [--only NAME ...]

For each model: the blocks that `AMPStrategy(compile=True)` compiles by TorchInductor; the peak of the second step with
AdamW as predicted for the eager step, measured eager and compiled; the largest difference of loss and gradients to the
eager step in float64, relative to the largest element, and whether the random state after it is the same; seconds of
the first compiled step. Models are left out whose package is not installed.
"""

import argparse
import time
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.page import origin, paragraph
from benchmarks.training.compiled import NAMES, measured
from benchmarks.zoo.cases import CASES
from benchmarks.zoo.subject import Case, made
from lightning_amp.errors import AmpError
from lightning_amp.footprint.profile_module import profile_module
from lightning_amp.installing.install import install_rules
from lightning_amp.techniques.compile.choose import blocks_to_compile

HEADER = ("model", "blocks", "predicted", "eager", "compiled", "compiled / eager", "difference", "random", "first step")


def subject(case: Case, dtype: torch.dtype, *, compiles: bool) -> tuple[Any, Any, int]:
    """A module as it trains, its batch, and the number of compiled blocks."""
    torch.manual_seed(0)
    module, batch = made(case, dtype)
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters())  # type: ignore[method-assign]
    rules = (
        blocks_to_compile(module, True, (), shared=False, budgeted=False, chain=None, steps=1.0)[0] if compiles else ()
    )
    install_rules(module, rules)
    return module, batch, len(rules)


def step(case: Case, *, compiles: bool) -> tuple[list[torch.Tensor], torch.Tensor, float]:
    """Loss and gradients in float64, the random state after the step, and its seconds."""
    torch.compiler.reset()
    module, batch, _ = subject(case, torch.float64, compiles=compiles)
    torch.manual_seed(1)
    start = time.perf_counter()
    loss = module.training_step(batch, 0)
    loss.backward()
    seconds = time.perf_counter() - start
    found = [loss.detach(), *(p.grad for p in module.parameters() if p.grad is not None)]
    return found, torch.get_rng_state(), seconds


def row(name: str) -> list[str]:
    """The cells of a model, or why its blocks are not compiled."""
    case = CASES[name]

    def make(*, compiles: bool) -> tuple[Any, Any]:
        return subject(case, torch.float32, compiles=compiles)[:2]

    try:
        module, batch, blocks = subject(case, torch.float32, compiles=True)
        found, state, seconds = step(case, compiles=True)
    except AmpError as error:
        return [name, str(error)]
    expected, before, _ = step(case, compiles=False)
    # gradients that are zero but for rounding, as of a key's bias in attention, count by the size of the others
    least = 1e-6 * max(float(b.abs().max()) for b in expected)
    pairs = zip(found, expected, strict=True)
    most = max(float((a - b).abs().max() / b.abs().max().clamp_min(least)) for a, b in pairs)
    predicted = profile_module(module, batch).peak_bytes
    del module, batch
    eager, compiled = measured(partial(make, compiles=False)), measured(partial(make, compiles=True))
    same = "same" if torch.equal(state, before) else "**differs**"
    numbers = (str(blocks), f"{predicted:,}", f"{eager:,}", f"{compiled:,}", f"{compiled / eager:.4f}", f"{most:.1g}")
    return [name, *numbers, same, f"{seconds:.0f} s"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(NAMES))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print("\n".join(paragraph(origin("python -m benchmarks.training.compiled_blocks"))))
    print(f"\n| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}")
    for name in asked.only:
        if find_spec(CASES[name].package) is not None:
            print(f"| {' | '.join(row(name))} |", flush=True)


if __name__ == "__main__":
    main()
