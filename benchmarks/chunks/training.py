"""Forward and backward pass in chunks: under budgets beside what else lowers the peak, and what a plan promises."""

import copy
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lightning_amp
from benchmarks.any_module.by_hand import change_by_hand
from benchmarks.chunks.kinds import MODELS, example_loss
from benchmarks.chunks.measure import Pass, counted, forward, memory_profile, most_allocated, seconds
from benchmarks.chunks.models import GPT, Language, Layer, ViT
from benchmarks.gpu.chunks import SquareLoss
from benchmarks.page import table
from lightning_amp.errors import AmpError, PlanError
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.graph.captures import Captures
from lightning_amp.quantities import format_bytes, format_seconds
from lightning_amp.techniques.chunk.regions.choose_chunks import OverBudget, choose_chunks
from lightning_amp.techniques.chunk.regions.chunk_bytes import chunk_bytes
from lightning_amp.techniques.chunk.run.in_chunks import InChunks
from lightning_amp.techniques.chunk.run.lower import table_of
from lightning_amp.techniques.chunk.run.planned import Planned, lower_within
from tests.any_module import load

SHARES = (0.5, 0.25)
TILES = 8
EXAMPLES = {"gene_transformer": {"cells": 8, "length": 256}, "evoformer": {"samples": 1, "side": 64},
            "unet": {"images": 4, "side": 64}}  # fmt: skip
PROMISED: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "attention and feed-forward": (lambda: Layer(32, 4, causal=False), lambda: torch.randn(2, 48, 32)),
    "the same, causal, one text": (lambda: Layer(16, 2, causal=True), lambda: torch.randn(1, 64, 16)),
    "GPT with its loss": (lambda: Language(32, 2, 200), lambda: torch.randint(200, (2, 40))),
    "ViT": (lambda: ViT(32, 2), lambda: torch.randn(3, 3, 48, 48)),
    "Evoformer block": (lambda: load("evoformer").Block(16, 4), lambda: torch.randn(1, 20, 20, 16)),
    "U-Net block": (lambda: load("unet").Residual(8, 16), lambda: torch.randn(4, 8, 16, 16)),
    "attention of pixels": (lambda: load("unet").PixelAttention(16), lambda: torch.randn(2, 16, 12, 12)),
    "block of the gene transformer":
        (lambda: load("gene_transformer").Block(32, 4, 0.0), lambda: torch.randn(3, 40, 32)),
}  # fmt: skip


def both_passes(module: nn.Module, args: tuple[Any, ...]) -> Pass:
    """Forward and backward pass of what a module returns, summed if it is no loss; its gradients do not stay."""

    def run() -> None:
        module(*args).sum().backward()
        module.zero_grad(set_to_none=True)

    return run


def models(*, quick: bool) -> Iterator[tuple[str, nn.Module, tuple[Any, ...]]]:
    """The kinds of AutoChunk's evaluation at the lengths of inference, and three examples."""
    gpt, *others = MODELS
    # short texts of a wide model have more gradients than activations
    length, dim, words = (256, 64, 100) if quick else (gpt.length, 256, 1000)
    torch.manual_seed(0)
    yield f"GPT, {length}", Language(dim=dim, words=words).eval(), (torch.randint(words, (1, length)),)
    if not quick:
        for model in others:
            yield f"{model.name}, {model.length}", SquareLoss(model.build()), model.args(model.length)
        for name, sizes in EXAMPLES.items():
            yield name, *example_loss(name, **sizes)


def training(*, quick: bool) -> Iterator[str]:
    """Bytes by torch's allocator, and time, of chunks and of others' ways."""
    rows = (row for name, module, args in models(quick=quick) for row in beside(name, module, args, quick=quick))
    yield from table(["model", "how", "bytes", "of eager", "time"], rows)


def beside(name: str, module: nn.Module, args: tuple[Any, ...], *, quick: bool) -> list[list[str]]:
    """Rows of one model; what is refused or fails says why."""
    whole = counted(both_passes(module, args))[0]
    ways: dict[str, Callable[[Any], Any]] = {
        **{
            f"chunks, {share:.0%}": partial(in_chunks, budget=int(share * whole))
            for share in SHARES[: 1 if quick else None]
        },
        "checkpoint per block": partial(change_by_hand, by_hand="recompute"),
    }
    if isinstance(module, Language):
        ways[f"feed-forward, head and loss in {TILES} tiles by hand"] = tiled
    if not quick:
        ways |= {f"activation_memory_budget {share}": partial(change_by_hand, by_hand=share) for share in (0.5, 0.1)}
    runs, rows = {"eager": both_passes(module, args)}, list[list[str]]()
    for label, change in ways.items():
        twin = copy.deepcopy(module)
        try:
            change(twin)
            both_passes(twin, args)()
            runs[label] = both_passes(twin, args)
        except (AmpError, RuntimeError, torch._dynamo.exc.TorchDynamoException) as error:
            rows.append([name, label, str(error).strip().partition("\n")[0], "", ""])
    peaks = dict[str, int]()
    for label, run in runs.items():
        with memory_profile() as found:
            run()
        peaks[label] = most_allocated(found)
    first, *ratios = seconds(list(runs.values()))
    times = [format_seconds(first), *(f"{ratio - 1:+.1%}" for ratio in ratios)]
    return [
        [name, label, format_bytes(peaks[label]), f"{peaks[label] / peaks['eager']:.1%}", spent]
        for label, spent in zip(runs, times, strict=True)
    ] + rows


def in_chunks(module: nn.Module, *, budget: int) -> None:
    """The whole module in chunks."""
    module.forward = partial(InChunks(budget, train=True), module)


def tiled(module: Language) -> None:
    """What a person writes for long inputs: feed-forward, and head with loss, some words at a time."""
    gpt = module.gpt

    def feed(layer: Layer, x: Tensor) -> Tensor:
        run = partial(checkpoint, partial(Layer.feed, layer), use_reentrant=False)
        return torch.cat([run(part) for part in x.chunk(TILES, dim=1)], dim=1)

    def loss(part: Tensor, words: Tensor) -> Tensor:
        return F.cross_entropy(gpt.head(part).flatten(0, 1), words.flatten(), reduction="sum")

    def forward(words: Tensor) -> Tensor:
        inner = gpt.norm(gpt.layers(gpt.words(words)))[:, :-1]
        pairs = zip(inner.chunk(TILES, dim=1), words[:, 1:].chunk(TILES, dim=1), strict=True)
        return sum(checkpoint(loss, *pair, use_reentrant=False) for pair in pairs) / words[:, 1:].numel()

    for layer in gpt.layers:
        layer.feed = partial(feed, layer)
    module.forward = forward


def promises(*, quick: bool) -> Iterator[str]:
    """Random budgets from the least to the bytes without chunks: predicted and taken, and whether more is slower."""
    draw, rows = random.Random(0), list[list[str]]()
    for name, (make, args) in PROMISED.items():
        torch.manual_seed(0)
        module, x = make().eval(), args()
        x = x.requires_grad_() if x.is_floating_point() else x
        tried = tries(module, x, 4 if quick else 25, draw)
        above = sum(found > budget for budget, _, _, found, _ in tried)
        off = max(abs(predicted / found - 1) for _, predicted, _, found, _ in tried)
        search = [by_table / found - 1 for _, _, by_table, found, _ in tried]
        slower = sum(b[-1] > a[-1] * (1 + 1e-9) for a, b in pairwise(tried))
        searched = f"{min(search):+.1%} to {max(search):+.1%}"
        rows.append([name, f"{len(tried)}", f"{above}", f"{off:.2%}", searched, f"{slower}"])
    header = ["module", "budgets met", "above the budget", "prediction off by", "search off by", "larger and slower"]
    yield from table(header, rows)


def tries(module: nn.Module, x: Tensor, n: int, draw: random.Random) -> list[tuple[int, int, int, int, float]]:
    """Of every budget: it, bytes that the plan says, that the search counted, that a step takes, predicted seconds."""
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
        tried.append((budget, plan.peak_bytes, by_table, step_bytes(lowered, module, x), plan.seconds))
    return tried


def step_bytes(run: Callable[..., Any], module: nn.Module, x: Tensor) -> int:
    """Most bytes of a forward and a backward pass beyond the gradients of the results."""
    module.zero_grad(set_to_none=True)
    x.grad = None
    live = LiveBytes()
    with live:
        result = run(module, x)
    seed = torch.ones_like(result)
    with live:
        result.backward(seed)
    return live.peak


class Different(nn.Module):
    """Blocks of as many widths."""

    def __init__(self, n: int) -> None:
        super().__init__()
        widths = [32 + 8 * k for k in range(n)]
        self.layers = nn.ModuleList(Layer(width, 4, causal=True) for width in widths)
        self.between = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise([32, *widths]))

    def forward(self, x: Tensor) -> Tensor:
        """[text, word, 32] -> with the last width."""
        for between, layer in zip(self.between, self.layers, strict=True):
            x = layer(between(x))
        return x


DEEP: dict[str, tuple[Callable[[], Any], Callable[[], Tensor]]] = {
    "48 blocks, all equal": (lambda: GPT(64, 48), lambda: torch.randint(1000, (1, 256))),
    "12 blocks, all different": (lambda: Different(12), lambda: torch.randn(1, 256, 32)),
}


def plan_time(*, quick: bool) -> Iterator[str]:
    """Seconds to plan deep models: whole in inference, and every block at half of its bytes in training."""
    rows = list[list[str]]()
    for name, (make, args) in list(DEEP.items())[1 if quick else 0 :]:
        torch.manual_seed(0)
        module, x = make().eval(), args()
        whole, begin = counted(forward(module, (x,)))[0], time.perf_counter()
        small = lightning_amp.chunk(module, x, budget=whole // 2)
        planned = time.perf_counter() - begin
        found = f"{format_bytes(counted(forward(small, (x,)))[0])} of {format_bytes(whole)}"
        rows.append([name, found, format_seconds(planned), *by_block(module, x)])
    header = ["model", "inference, half of eager's bytes", "planned in", "training, blocks in half", "planned in"]
    yield from table(header, rows)


def by_block(module: Any, x: Tensor) -> tuple[str, str]:
    """Bytes of a step whose blocks are each given half of what they take, and seconds of all plans."""
    eager, wholes = counted(both_passes(module, (x,)))[0], dict[nn.Module, int]()

    def note(block: Any, args: tuple[Tensor, ...], _: object) -> None:
        given = args[0].detach().requires_grad_()
        wholes[block] = counted(lambda: type(block).forward(block, given).sum().backward())[0]

    hooks = [block.register_forward_hook(note) for block in module.layers]
    module(x)
    for hook in hooks:
        hook.remove()
    known: dict[Any, Planned] = {}
    for block in module.layers:
        runner = InChunks(wholes[block] // 2, train=True)
        # all blocks of a model have the same, as a plan installs them
        runner.known = known
        block.forward = partial(runner, block)
    took = list[float]()
    for _ in range(2):
        begin = time.perf_counter()
        both_passes(module, (x,))()
        took.append(time.perf_counter() - begin)
    found = counted(both_passes(module, (x,)))[0]
    return f"{format_bytes(found)} of {format_bytes(eager)}", format_seconds(took[0] - took[1])
