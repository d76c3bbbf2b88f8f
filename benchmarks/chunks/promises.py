"""Random budgets in training: bytes predicted and taken, and whether more memory is ever slower."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from benchmarks.chunks.models import Language, Layer, ViT, example
from benchmarks.page import table
from lightning_amp._torch import tree_leaves
from lightning_amp.errors import PlanError
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.graph.capture import Captures
from lightning_amp.progress import track
from lightning_amp.techniques.chunk.regions.choose_chunks import OverBudget, choose_chunks
from lightning_amp.techniques.chunk.regions.chunk_bytes import chunk_bytes
from lightning_amp.techniques.chunk.run.lower import table_of
from lightning_amp.techniques.chunk.run.planned import lower_within

MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "attention and feed-forward": (lambda: Layer(32, 4, causal=False), lambda: torch.randn(2, 48, 32)),
    "the same, causal, one text": (lambda: Layer(16, 2, causal=True), lambda: torch.randn(1, 64, 16)),
    "GPT with its loss": (lambda: Language(32, 2, 200), lambda: torch.randint(200, (2, 40))),
    "ViT": (lambda: ViT(32, 2), lambda: torch.randn(3, 3, 48, 48)),
    "Evoformer block": (lambda: example("evoformer").Block(16, 4), lambda: torch.randn(1, 20, 20, 16)),
    "U-Net block": (lambda: example("unet").Residual(8, 16), lambda: torch.randn(4, 8, 16, 16)),
    "attention of pixels": (lambda: example("unet").PixelAttention(16), lambda: torch.randn(2, 16, 12, 12)),
    "block of the gene transformer": (
        lambda: example("gene_transformer").Block(32, 4, 0.0),
        lambda: torch.randn(3, 40, 32),
    ),
}


@dataclass(frozen=True, slots=True)
class Tried:
    """One budget that can be met.

    Attributes:
        budget: In bytes.
        predicted: Bytes that the plan says.
        by_table: Bytes that the search counted for the plan.
        found: Bytes by the meter in a forward and a backward pass with values.
        seconds: Predicted.
    """

    budget: int
    predicted: int
    by_table: int
    found: int
    seconds: float


def try_budgets(name: str, n: int, draw: random.Random) -> list[Tried]:
    """Random budgets of one module, from the least to what it takes as it is; in their order."""
    make, args = MODULES[name]
    torch.manual_seed(0)
    module, x = make().eval(), args()
    x = x.requires_grad_() if x.is_floating_point() else x
    capture = Captures().of(module, (x,), {})
    rows = table_of(capture)
    whole = choose_chunks(rows, 2**62, train=True).whole_bytes
    try:
        least = choose_chunks(rows, 1, train=True).peak_bytes
    except OverBudget as error:
        least = error.least_bytes
    tried = []
    for budget in sorted(int(least * (1.05 * whole / least) ** draw.random()) for _ in range(n)):
        try:
            lowered, plan = lower_within(capture, budget, train=True)
        except PlanError:
            continue
        by_table = chunk_bytes(rows, plan.regions, train=True).peak_bytes
        tried.append(Tried(budget, plan.peak_bytes, by_table, step_bytes(lowered, module, x), plan.seconds))
    return tried


def step_bytes(run: Callable[..., object], module: nn.Module, x: Tensor) -> int:
    """Most bytes of a forward and a backward pass beyond the gradients of the results."""
    live = LiveBytes()
    module.zero_grad(set_to_none=True)
    x.grad = None
    with live:
        results = [t for t in tree_leaves(run(module, x)) if isinstance(t, Tensor) and t.requires_grad]
    seeds = [torch.ones_like(t) for t in results]
    with live:
        torch.autograd.backward(results, seeds)
    return live.peak


def promises(*, quick: bool) -> Iterator[str]:
    """The table."""
    header = [
        "module",
        "budgets met",
        "above the budget",
        "prediction off by",
        "search off by",
        "larger and slower",
    ]
    draw, rows = random.Random(0), []
    for name in track(MODULES, description="random budgets", total=len(MODULES)):
        tried = try_budgets(name, 4 if quick else 25, draw)
        above = sum(t.found > t.budget for t in tried)
        off = max(abs(t.predicted / t.found - 1) for t in tried)
        low, high = (f(t.by_table / t.found - 1 for t in tried) for f in (min, max))
        slower = [b.seconds / a.seconds - 1 for a, b in pairwise(tried) if b.seconds > a.seconds * (1 + 1e-9)]
        rows.append([name, f"{len(tried)}", f"{above}", f"{off:.2%}", f"{low:+.1%} to {high:+.1%}",
                     f"{len(slower)}" + (f", by {max(slower):.1%}" if slower else "")])  # fmt: skip
    yield from table(header, rows)
