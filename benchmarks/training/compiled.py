"""Bytes of steps with compiled modules, as counted on fake tensors and as torch's profiler sees them.

    python -m benchmarks.training.compiled [--only NAME ...] [--shares 1 0.5 0.01] [--backend inductor] [--quick]

For each model of transformers, timm, torchvision and torch.nn, and each activation memory budget: the peak of the
second step with AdamW, predicted and measured, their ratio, the largest difference of loss and gradients to the plainly
compiled step, in float64 for backends without C++, and the seconds of the count. The profiler records every allocation
of the process, also those of compiled code. Models are left out whose package is not installed. Each budget of each
model is compiled once: about a minute with TorchInductor on a CPU.
"""

import argparse
import gc
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.page import origin, paragraph
from benchmarks.zoo.cases import CASES
from benchmarks.zoo.subject import Case, made
from lightning_amp.costs.rule import Rule
from lightning_amp.errors import AmpError
from lightning_amp.footprint.profile_module import profile_module
from lightning_amp.installing.install import install_rules
from lightning_amp.techniques.compiled_budget.row import CompiledBudget

NAMES = (
    *("transformers: gpt2", "timm: test_vit", "torchvision: squeezenet1_1", "transformers: bert"),
    *("timm: test_convnext", "transformers: llama", "timm: test_resnet", "transformers: t5"),
    *("timm: test_efficientnet", "vit_pytorch: ViT", "transformers: vit", "x_transformers: Decoder"),
)
HEADER = ("model", "budget", "predicted", "measured", "ratio", "difference", "count")
MARK = "second step"


def compiled(case: Case, backend: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """A module with a compiled network, and its batch."""
    module, batch = made(case, dtype)
    module.network = torch.compile(module.network, backend=backend)
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters())  # type: ignore[method-assign]
    return module, batch


def rule(share: float) -> Rule:
    """The technique with this budget."""
    return Rule(strategy="compiled_budget", fqn="", spec=CompiledBudget(share=share), why="measured")


def measured(make: Callable[[], tuple[Any, Any]]) -> int:
    """Most bytes of the process's tensors in the second step, in the order of Lightning's loop.

    Args:
        make: Makes the module, as it trains, and its batch.
    """
    torch.compiler.reset()
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        module, batch = make()
        optimizer = module.configure_optimizers()
        for k in range(2):
            if k:
                with torch.profiler.record_function(MARK):
                    pass
            loss = module.training_step(batch, 0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            del loss
    events = profiler.profiler.kineto_results.events()
    start = max(event.start_ns() for event in events if event.name() == MARK)
    now = peak = 0
    for at, n_bytes in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        now += n_bytes
        peak = max(peak, now) if at >= start else peak
    return peak


def budgeted(case: Case, backend: str, share: float) -> tuple[Any, Any]:
    """The compiled module with a budget, and its batch."""
    module, batch = compiled(case, backend, torch.float32)
    install_rules(module, [rule(share)])
    return module, batch


def gradients(case: Case, backend: str, share: float) -> list[torch.Tensor]:
    """Loss and gradients of one step."""
    torch.compiler.reset()
    module, batch = compiled(case, backend, torch.float32 if backend == "inductor" else torch.float64)
    install_rules(module, [rule(share)])
    torch.manual_seed(1)
    loss = module.training_step(batch, 0)
    loss.backward()
    return [loss.detach(), *(p.grad for p in module.parameters() if p.grad is not None)]


def rows(name: str, backend: str, shares: list[float]) -> None:
    """Print the rows of one model."""
    case = CASES[name]
    plain = gradients(case, backend, 1.0)
    for share in shares:
        start = time.perf_counter()
        module, batch = compiled(case, backend, torch.float32)
        installed = install_rules(module, [rule(share)])
        profile = profile_module(module, batch)
        installed.undo()
        seconds = time.perf_counter() - start
        if profile.reason:
            print(f"| {name} | {share:g} | {profile.reason} |", flush=True)
            return
        del module
        found = measured(partial(budgeted, case, backend, share))
        pairs = zip(gradients(case, backend, share), plain, strict=True)
        most = max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in pairs)
        ratio = profile.peak_bytes / found
        cells = (name, f"{share:g}", f"{profile.peak_bytes:,}", f"{found:,}", f"{ratio:.4f}", f"{most:.1g}")
        print("| " + " | ".join((*cells, f"{seconds:.1f} s")) + " |", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(NAMES))
    parser.add_argument("--shares", nargs="+", type=float, default=[1.0, 0.5, 0.01])
    parser.add_argument("--backend", default="inductor", help="inductor, or aot_eager, which needs no C++ compiler")
    parser.add_argument("--quick", action="store_true", help="torch.nn's encoder with aot_eager")
    asked = parser.parse_args()
    names, backend = (["torch: nn.TransformerEncoder"], "aot_eager") if asked.quick else (asked.only, asked.backend)
    torch.set_num_threads(1)
    print("\n".join(paragraph(origin("python -m benchmarks.training.compiled"))))
    print(f"\n| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}")
    for name in names:
        if find_spec(CASES[name].package) is not None:
            try:
                rows(name, backend, asked.shares)
            except AmpError as error:
                print(f"| {name} | refused: {str(error).splitlines()[0]} |", flush=True)


if __name__ == "__main__":
    main()
