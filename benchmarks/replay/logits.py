"""Cross-entropy of a wide layer: plain, by our `logits`, and by torch's `linear_cross_entropy` in chunks.

    python -m benchmarks.replay.logits [--tokens 1024] [--words 50000] [--width 512]

For each: the most bytes that torch's allocator gives out in a forward and backward pass beyond what was there, the
gradients among them; processor seconds by those of the plain step, medians of rounds in which all run; the largest
difference of loss and gradients to the plain step, relative to a tensor's largest value. On one thread of a CPU, in
float32. `linear_cross_entropy` is left out where torch has none (before 2.14). About a minute.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.chunks import measure
from benchmarks.page import origin
from lightning_amp.quantities import format_bytes, format_seconds
from lightning_amp.techniques.logits.install import in_chunks

ROUNDS = 5
Loss = Callable[[nn.Linear, Tensor, Tensor], Tensor]


def plain(head: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    """Logits are whole."""
    return functional.cross_entropy(head(x), y)


def of_torch(head: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    """By torch, whose options choose the length of a chunk."""
    options = torch.nn.LinearCrossEntropyOptions()
    found: Tensor = functional.linear_cross_entropy(x, head.weight, y, options=options)
    return found


WAYS: dict[str, Loss] = {"plain": plain, "`logits`": in_chunks(plain)}
if hasattr(functional, "linear_cross_entropy"):
    WAYS["`linear_cross_entropy`"] = of_torch


class Scored(nn.Module):
    """A layer, and the loss of a wide one."""

    def __init__(self, loss: Loss, width: int, words: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.loss, self.before, self.head = loss, nn.Linear(width, width), nn.Linear(width, words, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean over all rows."""
        return self.loss(self.head, self.before(x), y)


def seconds(run: measure.Pass) -> float:
    """Of the processor."""
    begin = time.process_time()
    run()
    return time.process_time() - begin


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--words", type=int, default=50_000)
    parser.add_argument("--width", type=int, default=512)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    batch = torch.randn(asked.tokens, asked.width), torch.randint(0, asked.words, (asked.tokens,))
    modules = {name: Scored(loss, asked.width, asked.words) for name, loss in WAYS.items()}
    runs = {name: measure.both_passes(module, batch) for name, module in modules.items()}
    peaks, results = dict[str, int](), list[list[Tensor]]()
    for name, run in runs.items():
        with measure.memory_profile() as profile:
            run()
        peaks[name] = measure.most_allocated(profile)
        with torch.no_grad():
            loss = modules[name](*batch)
        results.append([loss, *(p.grad for p in modules[name].parameters() if p.grad is not None)])
    rounds = [[seconds(run) for run in runs.values()] for _ in range(ROUNDS)]
    times = [median(column) for column in zip(*rounds, strict=True)]
    print(origin("python -m benchmarks.replay.logits"))
    print(f"{asked.tokens:,} rows of width {asked.width}, {asked.words:,} words.\n")
    print("| loss | peak | of plain | time | difference |\n|---|---|---|---|---|")
    for (name, peak), each, found in zip(peaks.items(), times, results, strict=True):
        share = format_seconds(each) if name == "plain" else f"{each / times[0]:.2f}"
        apart = measure.largest_difference(results[0], found)
        print(f"| {name} | {format_bytes(peak)} | {peak / peaks['plain']:.0%} | {share} | {apart:.0e} |")


if __name__ == "__main__":
    main()
