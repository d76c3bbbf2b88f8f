"""Measure where the time of chunks goes: operators, bytes copied and seconds by kind of operator, eager and in chunks.

python -m benchmarks.chunks.where "U-Net with attention" --share 0.2
python -m benchmarks.chunks.where                                       a table of all models at 50% and 20%
python -m benchmarks.chunks.where --train                               and of forward and backward at 25% and 10%
"""

import argparse
import copy
import ctypes
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_amp
from benchmarks.chunks.measure import Pass, count, forward, largest_difference
from benchmarks.chunks.models import GPT, ViT
from benchmarks.page import table
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.chunk.run.in_chunks import InChunks
from tests.any_module import load, make


class Loss(nn.Module):
    """The loss of a module of examples/any_module, without a Trainer."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, module.log = module, lambda *_, **__: None  # type: ignore[assignment]

    def forward(self, batch: Any) -> Tensor:
        if self.module.automatic_optimization:
            return self.module.training_step(batch, 0)  # type: ignore[operator]
        return F.mse_loss(self.module(batch), batch)


def example(name: str, **sizes: int) -> tuple[nn.Module, Any]:
    """Of examples/any_module, with its batch."""
    module, batch = make(name, **sizes)
    return Loss(module), batch


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "GPT prefill": lambda: (GPT(), torch.randint(1000, (1, 1024))),
    "ViT": lambda: (ViT(), torch.randn(1, 3, 256, 256)),
    "U-Net with attention": lambda: (load("unet").UNet(), torch.randn(2, 3, 96, 96)),
    "Evoformer": lambda: (load("evoformer").Block(32, 4), torch.randn(1, 96, 96, 32)),
    "unet": lambda: example("unet", images=4, side=64),
    "vit": lambda: example("vit", images=8),
    "geneformer": lambda: example("geneformer", cells=8, length=192),
    "gene_transformer": lambda: example("gene_transformer", cells=8, length=256),
    "evoformer": lambda: example("evoformer", samples=1, side=64),
    "wide_mlp": lambda: example("wide_mlp", cells=64),
}
SMALL = ("U-Net with attention", "unet", "vit", "geneformer", "evoformer", "wide_mlp")
"""Models of small pieces."""
TRAINED = ("evoformer", "unet", "gene_transformer")
KINDS = {
    "convolution": ("conv", "mkldnn"),
    "matrix product": ("mm", "addmm", "linear", "einsum"),
    "norm": ("norm",),
    "softmax": ("softmax",),
    "copies": ("copy", "clone", "cat", "contiguous", "fill", "zero"),
    "views": ("slice", "narrow", "view", "reshape", "expand", "unsqueeze", "transpose", "permute", "split", "chunk",
              "select", "as_strided", "alias", "detach", "flatten", "empty", "squeeze", "unflatten"),
}  # fmt: skip
ROUNDS = 15


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


def keep_memory() -> None:
    """Let malloc keep what is freed, as torch does on a GPU: else eager's large tensors are new pages in every pass.

    Whether they are depends on what the process has freed before. The constants are `M_TRIM_THRESHOLD` and
    `M_MMAP_THRESHOLD` of glibc.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(-1, 1 << 30)
    libc.mallopt(-3, 1 << 25)


def built(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """A model and its arguments, always the same."""
    torch.manual_seed(0)
    module, args = MODELS[name]()
    return module.eval(), (args,)


def rows_of(name: str, shares: Sequence[float]) -> Iterator[list[str]]:
    """Of the table of all models."""
    module, args = built(name)
    eager = forward(module, args)
    whole, n_eager, _ = count(eager)
    for share in shares:
        small = forward(lightning_amp.chunk(module, *args, budget=int(share * whole)), args)
        difference, (seconds, times) = largest_difference(eager(), small()), ratio(eager, small)
        n_bytes, n, _ = count(small)
        yield [name, f"{share:.0%}", f"{n_bytes / whole:.1%}", f"{n_eager:,}", f"{n:,}", f"{1e3 * seconds:.3g}",
               f"{times - 1:+.1%}", f"{difference:.0e}"]  # fmt: skip


def step(module: nn.Module, args: tuple[Any, ...]) -> Pass:
    """Forward and backward pass of a loss."""

    def run() -> None:
        module.zero_grad()
        module(*args).backward()

    return run


def rows_of_training(name: str, shares: Sequence[float]) -> Iterator[list[str]]:
    """Of the table of training: the whole module in chunks, or what is the least."""
    module, args = built(name)
    eager = step(module, args)
    whole = count(eager)[0]
    module.zero_grad()
    for share in shares:
        small = copy.deepcopy(module)
        runner = InChunks(int(share * whole), train=True)
        small.forward = partial(runner, small)  # type: ignore[method-assign]
        planned = runner.planned(small, args, {}).chunks
        run = step(small, args)
        run()
        small.zero_grad()
        n_bytes, n, _ = count(run)
        seconds, times = ratio(eager, run)
        yield [name, f"{share:.0%}", f"{n_bytes / whole:.1%}", format_bytes(planned.peak_bytes),
               format_bytes(n_bytes), f"{n:,}", f"{1e3 * seconds:.3g}", f"{times - 1:+.1%}"]  # fmt: skip


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", choices=[*MODELS], nargs="?", help="a table of all models of small pieces without it")
    parser.add_argument("--share", type=float, nargs="+", help="of eager's bytes")
    parser.add_argument("--train", action="store_true", help="forward and backward pass")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    warnings.simplefilter("ignore")
    shares = asked.share or ([0.25, 0.1] if asked.train else [0.5, 0.2])
    if asked.model and not asked.train:
        for share in shares:
            show(asked.model, share)
        return
    if asked.train:
        header = ["model", "budget", "of eager", "predicted", "measured", "operators", "eager, ms", "time"]
        names = [asked.model] if asked.model else TRAINED
        rows = (row for name in names for row in rows_of_training(name, shares))
    else:
        header = ["model", "budget", "bytes", "operators", "in chunks", "eager, ms", "time", "difference"]
        rows = (row for name in SMALL for row in rows_of(name, shares))
    for line in table(header, rows):
        print(line, flush=True)


def show(name: str, share: float) -> None:
    """Print where the time of one model goes."""
    module, args = built(name)
    eager = forward(module, args)
    whole = count(eager)[0]
    small = forward(lightning_amp.chunk(module, *args, budget=int(share * whole)), args)
    runs = {"eager": eager, "chunks": small}
    difference = largest_difference(eager(), small())
    seconds, times = ratio(eager, small)
    print(f"{name}, {share:.0%}: {times - 1:+.1%} on {1e3 * seconds:.3g} ms, difference {difference:.1g}")
    rows, counts, spent = [], {}, {}
    for way, run in runs.items():
        n_bytes, n, flop = count(run)
        with torch.no_grad(), _Copied() as copied:
            run()
        # the profiler's own time is that of its events; the median round hides other processes
        rounds = [self_seconds(run) for _ in range(ROUNDS)]
        counts[way] = copied.n
        spent[way] = {k: median(r[k] for r in rounds) for k in {k for r in rounds for k in r}}
        rows.append([way, format_bytes(n_bytes), f"{n_bytes / whole:.1%}", f"{n:,}", f"{flop:.4g}",
                     format_bytes(copied.n_bytes)])  # fmt: skip
    print("\n".join(table(["", "bytes", "of eager", "operators", "FLOP", "copied"], rows)))
    print("\n".join(table(
        ["kind", "eager", "chunks", "eager, ms", "chunks, ms"],
        [[k, *(str(counts[n][k]) for n in runs), *(f"{1e3 * spent[n].get(k, 0):.2f}" for n in runs)]
         for k in dict.fromkeys((*KINDS, "by entry and sums"))])))  # fmt: skip


if __name__ == "__main__":
    main()
