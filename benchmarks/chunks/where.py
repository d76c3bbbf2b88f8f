"""Measure where the time of chunks goes: operators, bytes copied and seconds by kind of operator, eager and in chunks.

python -m benchmarks.chunks.where "U-Net with attention" --share 0.2
"""

import argparse
import time
import warnings
from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_amp
from benchmarks.chunks.measure import Pass, count, forward, largest_difference
from benchmarks.chunks.models import GPT, ViT
from benchmarks.page import table
from lightning_amp.quantities import format_bytes
from tests.any_module import load

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "GPT prefill": (GPT, lambda: torch.randint(1000, (1, 1024))),
    "ViT": (ViT, lambda: torch.randn(1, 3, 256, 256)),
    "U-Net with attention": (lambda: load("unet").UNet(), lambda: torch.randn(2, 3, 96, 96)),
    "Evoformer": (lambda: load("evoformer").Block(32, 4), lambda: torch.randn(1, 96, 96, 32)),
}
KINDS = {
    "convolution": ("conv", "mkldnn"),
    "matrix product": ("mm", "addmm", "linear", "einsum"),
    "norm": ("norm",),
    "softmax": ("softmax",),
    "copies": ("copy", "clone", "cat", "contiguous", "fill", "zero"),
    "views": ("slice", "narrow", "view", "reshape", "expand", "unsqueeze", "transpose", "permute", "split", "chunk",
              "select", "as_strided", "alias", "detach", "flatten", "empty", "squeeze", "unflatten"),
}  # fmt: skip
ROUNDS = 9


def kind(name: str) -> str:
    """Of an operator."""
    own = name.removeprefix("aten::").strip("_")
    return next((k for k, parts in KINDS.items() if any(p in own for p in parts)), "by entry and sums")


class _Copied(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operators by kind, and bytes that copies write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.n, self.n_bytes = Counter[str](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, of = func(*args, **(kwargs or {})), kind(str(func._opname))
        self.n[of] += 1
        if of == "copies" and isinstance(result, Tensor):
            self.n_bytes += result.nbytes
        return result


def self_seconds(run: Pass) -> Counter[str]:
    """Processor time by kind of operator in one pass, without that of the operators that it calls."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        run()
    times = Counter[str]()
    for event in found.key_averages():
        times[kind(event.key)] += event.self_cpu_time_total / 1e6
    return times


def ratio(first: Pass, second: Pass) -> tuple[float, float]:
    """Median processor seconds of the first, and how many times that the second takes in the same round."""
    pairs = []
    for _ in range(ROUNDS + 1):
        times = []
        for run in (first, second):
            begin = time.thread_time()
            run()
            times.append(time.thread_time() - begin)
        pairs.append(times)
    return median(a for a, _ in pairs[1:]), median(b / a for a, b in pairs[1:])


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", choices=[*MODELS])
    parser.add_argument("--share", type=float, default=0.2, help="of eager's bytes")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    make, inputs = MODELS[asked.model]
    module, args = make().eval(), (inputs(),)
    eager = forward(module, args)
    whole = count(eager)[0]
    small = forward(lightning_amp.chunk(module, *args, budget=int(asked.share * whole)), args)
    runs = {"eager": eager, "chunks": small}
    difference = largest_difference(eager(), small())
    seconds, times = ratio(eager, small)
    print(
        f"{asked.model}, {asked.share:.0%}: {times - 1:+.1%} on {1e3 * seconds:.3g} ms, difference {difference:.1g}"
    )
    rows, counts, spent = [], {}, {}
    for name, run in runs.items():
        n_bytes, n, flop = count(run)
        with torch.no_grad(), _Copied() as copied:
            run()
        # the profiler's own time is that of its events; the median round hides other processes
        rounds = [self_seconds(run) for _ in range(ROUNDS)]
        counts[name] = copied.n
        spent[name] = {k: median(r[k] for r in rounds) for k in {k for r in rounds for k in r}}
        rows.append([name, format_bytes(n_bytes), f"{n_bytes / whole:.1%}", f"{n:,}", f"{flop:.4g}",
                     format_bytes(copied.n_bytes)])  # fmt: skip
    print("\n".join(table(["", "bytes", "of eager", "operators", "FLOP", "copied"], rows)))
    print("\n".join(table(
        ["kind", "eager", "chunks", "eager, ms", "chunks, ms"],
        [[k, *(str(counts[n][k]) for n in runs), *(f"{1e3 * spent[n].get(k, 0):.2f}" for n in runs)]
         for k in dict.fromkeys((*KINDS, "by entry and sums"))])))  # fmt: skip


if __name__ == "__main__":
    main()
