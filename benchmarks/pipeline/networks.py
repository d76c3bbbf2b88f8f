"""Training time of CSIMD and of its baselines for the networks of Zhou et al. 2025, Sections V-B and V-C, predicted.

    python -m benchmarks.pipeline.networks [--quick] [--only NAME ...] [--tokens] [--write]

The step of every network is counted on fake tensors, for the whole batch and for four rows of it, at the rates of the
paper's devices (NVIDIA V100: 15.7 TFLOP/s in float32, 900 GB/s by the data sheet; 5 us an operator) and the links that
it names. Seconds of a step are Eq. 8, as a ratio to the best pair of a cut and a number of micro-batches p:

    GPipe-E-p   as many layers in every stage, p micro-batches: 1, 4 and the batch
    GPipe-R     stages and p drawn at random, three times
    cross       the paper's cross-search, from p = 1

No pipeline is run. `--write` puts the tables into docs/paper/csimd.md. About ten minutes, with --quick one; --tokens is
the table of slices of texts (tokens.py) alone, half a minute.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.page import ROOT, origin, paragraph, table, write_part
from benchmarks.pipeline.models import GPT, VGG, Blocks
from benchmarks.pipeline.tokens import section
from lightning_amp.costs.device_rates import Links, Rates, rates_for
from lightning_amp.footprint.run.run_settings import RunSettings
from lightning_amp.lightning.profiling.step_of_module import StepOfModule
from lightning_amp.progress import track
from lightning_amp.techniques.pipeline.schedule.micro_batches import (
    LayerSeconds,
    LayerTimes,
    counts_for,
    cut_for,
    gpipe_seconds,
    search_all,
)
from lightning_amp.techniques.pipeline.stage_facts import stages_of

PAGE = ROOT / "docs" / "paper" / "csimd.md"
PART, SLICES = "pipeline.networks", "pipeline.tokens"
GIGABIT = 1.25e8
"""Bytes per second of a link of one gigabit per second."""
STRATEGIES = ("E-1", "E-4", "E-BS", "R1", "R2", "R3", "cross")
Ratios = dict[str, float]


class CNN(Blocks):
    """Table III: convolutions of 20 to 50 channels, then a linear layer.

    Args:
        layers: K, the linear layer too.
        seed: Of the numbers of channels.
    """

    def __init__(self, layers: int, seed: int) -> None:
        super().__init__()
        wide = [1, *np.random.default_rng(seed).integers(20, 51, layers - 1).tolist()]
        convolutions = [nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.ReLU()) for a, b in pairwise(map(int, wide))]
        # the linear layer has as many inputs as the last convolution has channels: a mean over all places
        last = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(int(wide[-1]), 10))
        self.blocks = nn.ModuleList([*convolutions, last])

    def after(self, x: Tensor, batch: Tensor) -> Tensor:
        """Cross-entropy of a class that is part of the image."""
        return F.cross_entropy(x, batch[:, 0, :10, 0].argmax(1))

    def configure_optimizers(self) -> Any:
        """Plain descent."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """A row of the table.

    Attributes:
        modules: What is trained, each with its batch; ratios are over all of them.
        stages: Numbers of stages.
        paper: Average ratios of the paper, by strategy.
        gigabits: Per second, of links: what the paper names, and what fits its ratios better.
    """

    modules: Callable[[], Iterator[tuple[Any, Tensor]]]
    stages: tuple[int, ...]
    paper: str
    gigabits: tuple[int, ...] = (10, 100)


def cnns() -> Iterator[tuple[Any, Tensor]]:
    """Of 8 to 19 layers."""
    for layers in range(8, 20):
        with torch.device("meta"):
            yield CNN(layers, layers), torch.zeros(64, 1, 100, 100)


def vgg() -> Iterator[tuple[Any, Tensor]]:
    """VGG-16 for images of 224 x 224, of 138 million parameters."""
    with torch.device("meta"):
        yield VGG(side=224, whole=True), torch.zeros(64, 3, 224, 224)


def texts(rows: int, length: int, **sizes: Any) -> Callable[[], Iterator[tuple[Any, Tensor]]]:
    """A GPT, also in the place of a Llama of its size."""

    def made() -> Iterator[tuple[Any, Tensor]]:
        with torch.device("meta"):
            module = GPT(words=50_257, length=length, **sizes)
            yield module, torch.zeros(rows, length, dtype=torch.int64)

    return made


COUNTED = 4
"""Rows of the second batch that is counted: one row alone is computed by other operators."""
N_2_TO_8 = tuple(range(2, 9))
CNN_PAPER = "E 2.40, 1.24, 2.93; R 2.29, 2.24, 1.76"
VGG_PAPER = "E 4.68, 1.80, 1.40; R 2.01, 2.12, 2.10"
GPT_PAPER = "E 6.35, 2.01, 7.75; R 2.62, 2.66, 2.40"
LLAMA_PAPER = "E 4.42, 1.53, 10.79; R 2.73, 2.76, 2.80"
LARGE, XL = {"dim": 1280, "heads": 20, "layers": 36}, {"dim": 1600, "heads": 25, "layers": 48}
LLAMA_3B, LLAMA_7B = {"dim": 3072, "heads": 32, "layers": 28}, {"dim": 4096, "heads": 32, "layers": 32}
NETWORKS = {
    "CNNs of 8 to 19 layers": Network(modules=cnns, stages=(4, 8), paper=CNN_PAPER),
    "VGG-16": Network(modules=vgg, stages=N_2_TO_8, paper=VGG_PAPER, gigabits=(1, 10, 100)),
    "GPT-2 Large": Network(modules=texts(512, 64, **LARGE), stages=N_2_TO_8, paper=GPT_PAPER),
    "GPT-2 XL": Network(modules=texts(512, 64, **XL), stages=N_2_TO_8, paper=GPT_PAPER),
    "GPT of the size of Llama 3.2 3B": Network(modules=texts(256, 32, **LLAMA_3B), stages=N_2_TO_8, paper=LLAMA_PAPER),
    "GPT of the size of Llama 2 7B": Network(modules=texts(256, 32, **LLAMA_7B), stages=N_2_TO_8, paper=LLAMA_PAPER),
}
QUICK = ("CNNs of 8 to 19 layers",)


def rates(gigabits: float) -> Rates:
    """Of a V100, and of links of so many gigabits per second."""
    links = Links(
        intra_bandwidth=gigabits * GIGABIT, inter_bandwidth=gigabits * GIGABIT, latency=5e-5, ranks_per_node=1
    )
    return replace(rates_for("RTX 3090"), matmul_flops=15.7e12, memory_bytes=900e9, links=links, device="a V100")


def times(module: Any, batch: Tensor, *, of: Rates) -> LayerTimes:
    """Of every layer, for every number of micro-batches up to the batch."""
    rows = len(batch)
    seen = StepOfModule(module, lambda: batch, run_settings=RunSettings()).profiled(of)
    known = stages_of(seen)
    assert known.passes is not None, known.reason
    whole, least = known.passes(None), known.passes(COUNTED)
    if isinstance(whole, str) or isinstance(least, str):
        raise SystemExit(f"{type(module).__name__} has no stages: {whole}, {least}")
    layers = dict[int, LayerSeconds]()
    for count in counts_for(rows, [4]):
        part = whole if count == 1 else whole.at(least, -(-rows // count))
        assert part is not None, "operators of a batch of another length are the same"
        # the paper's steps have no part that runs once: what follows the blocks belongs to the last one
        layers[count] = LayerSeconds.of(part, whole, links=of.links, crossing=(True,), micro_batches=1, at_once=False)
    return LayerTimes.of(layers)


def cross_search(layer_times: LayerTimes, stages: int) -> float:
    """Seconds of Algorithm 1: cut for one micro-batch, take the best number for the cut, until neither improves."""
    row, best = 0, inf
    while True:
        seconds = gpipe_seconds(layer_times, cut_for(layer_times, row, stages))
        row = int(seconds.argmin())
        if seconds[row] >= best:
            return best
        best = float(seconds[row])


def ratios(layer_times: LayerTimes, stages: int, seed: int) -> Ratios:
    """Seconds of each strategy, to those of the best pair."""
    layers, counts = layer_times.forward.shape[1], layer_times.counts
    best = search_all(layer_times, stages).seconds
    even = tuple(layers * (s + 1) // stages for s in range(stages))
    found = {
        f"E-{name}": float(gpipe_seconds(layer_times, even)[counts.index(count)]) / best
        for name, count in (("1", 1), ("4", 4), ("BS", counts[-1]))
    }
    for n in (1, 2, 3):
        rng = np.random.default_rng((seed, stages, n))
        ends = (*sorted(rng.choice(layers - 1, stages - 1, replace=False) + 1), layers)
        found[f"R{n}"] = float(gpipe_seconds(layer_times, ends)[rng.integers(len(counts))]) / best
    return found | {"cross": cross_search(layer_times, stages) / best}


def rows(name: str, network: Network) -> Iterator[list[str]]:
    """Ratios over all modules and numbers of stages, a row for each rate of the links."""
    modules = list(network.modules())
    for gigabits in network.gigabits:
        every, used = list[Ratios](), list[int]()
        for seed, (module, batch) in enumerate(modules):
            # what is sent between two ranks does not depend on how many there are
            layer_times = times(module, batch, of=rates(gigabits))
            for n in network.stages:
                if n <= len(module.blocks):
                    every.append(ratios(layer_times, n, seed))
                    used.append(len(search_all(layer_times, n).ends))
        shown = [
            f"{min(values):.2f}, {mean(values):.2f}, {max(values):.2f}"
            for values in ([found[strategy] for found in every] for strategy in STRATEGIES)
        ]
        yield [name, f"{gigabits} Gb/s", *shown, str(max(used)), network.paper]


def main() -> None:
    """Print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the first network alone")
    parser.add_argument("--only", nargs="+", choices=list(NETWORKS))
    parser.add_argument("--tokens", action="store_true", help="slices of texts alone")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/paper/csimd.md")
    asked = parser.parse_args()
    if asked.tokens or asked.write:
        command = "python -m benchmarks.pipeline.networks --tokens --write"
        lines = [*paragraph(origin(command)), *section(rates(10))]
        if asked.write:
            write_part(Path(PAGE), SLICES, lines)
        print("\n".join(lines))
    if asked.tokens:
        return
    names = asked.only or (QUICK if asked.quick else list(NETWORKS))
    made = [
        row for name in track(names, description="networks", total=len(names)) for row in rows(name, NETWORKS[name])
    ]
    lines = [
        *paragraph(
            f"""{origin("python -m benchmarks.pipeline.networks --write")} Predicted: steps counted on fake tensors, at
            the rates of a V100's data sheet. Least, mean and largest ratio of the time of a step (Eq. 8) to that of the
            best pair of a cut and a number of micro-batches, over the numbers of stages N (4 and 8 of CNNs, else 2 to
            8); the most stages that the best pair uses; in the last column the paper's averages, measured."""
        ),
        *table(["network", "links", *(f"GPipe-{s}" for s in STRATEGIES[:-1]), "cross", "stages", "the paper"], made),
    ]
    if asked.write:
        write_part(Path(PAGE), PART, lines)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
