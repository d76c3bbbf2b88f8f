"""Forward and backward pass under budgets, beside what else lowers the peak: bytes by torch's allocator, and time."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.chunks.measure import Pass, allocated, count, seconds, step
from benchmarks.chunks.models import MODELS, Language, Model, build_example
from benchmarks.page import table
from lightning_amp.errors import AmpError
from lightning_amp.footprint.find_blocks import find_blocks
from lightning_amp.progress import track
from lightning_amp.quantities import format_bytes, format_seconds
from lightning_amp.techniques.chunk.run.in_chunks import InChunks

SHARES = (0.5, 0.25)
COMPILED = (0.5, 0.1)
"""Values of `torch._functorch.config.activation_memory_budget`."""
TILES = 8
Build = Callable[[], tuple[nn.Module, tuple[Any, ...]]]


def models(*, quick: bool) -> dict[str, Build]:
    """The kinds of model of AutoChunk's evaluation, at the lengths of the table of inference, and three examples."""
    gpt, *others = MODELS
    length = gpt.quick_length if quick else gpt.length

    def language() -> tuple[nn.Module, tuple[Any, ...]]:
        torch.manual_seed(0)
        return Language(dim=256, words=1000).eval(), (torch.randint(1000, (1, length)),)

    def of(model: Model) -> tuple[nn.Module, tuple[Any, ...]]:
        return model.build(), model.args(model.length)

    found: dict[str, Build] = {f"GPT, {length}": language}
    if not quick:
        found |= {f"{model.name}, {model.length}": partial(of, model) for model in others}
        names = ("gene_transformer", "evoformer", "unet")
        found |= {name: partial(build_example, name, quick=quick) for name in names}
    return found


def training(*, quick: bool) -> Iterator[str]:
    """The table."""
    header = ["model", "how", "bytes", "of eager", "time"]
    asked = models(quick=quick)
    rows = (
        row
        for name in track(asked, description="training", total=len(asked))
        for row in rows_of(name, asked[name], quick=quick)
    )
    yield from table(header, rows)


def rows_of(name: str, build: Build, *, quick: bool) -> list[list[str]]:
    """Eager, chunks under budgets, and the peers."""
    module, args = build()
    whole = count(step(module, args))[0]
    runs: dict[str, Pass] = {"eager": step(module, args)}
    refused: dict[str, str] = {}
    makers: dict[str, Callable[[], nn.Module]] = {
        f"chunks, {share:.0%}": partial(chunked, module, int(share * whole)) for share in SHARES
    }
    makers["checkpoint per block"] = partial(recomputed, module)
    if isinstance(module, Language):
        makers[f"feed-forward, head and loss in {TILES} tiles by hand"] = partial(tiled, module)
        makers["inductor"] = partial(compiled, module, "inductor", 1.0)
        makers["inductor, its auto_chunker"] = partial(compiled, module, "inductor", 1.0, auto_chunker=True)
    for budget in COMPILED[: 1 if quick else None]:
        backend = "aot_eager_decomp_partition"
        makers[f"activation_memory_budget {budget}"] = partial(compiled, module, backend, budget)
    for label, make in makers.items():
        try:
            form = make()
            runs[label] = step(form, args)
            runs[label]()
        except AmpError as error:
            refused[label] = str(error)
            runs.pop(label, None)
        except Exception as error:
            # a peer that does not run is told as that
            refused[label] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:80]}"
            runs.pop(label, None)
    peaks = {label: allocated(run) for label, run in runs.items()}
    first, *shares = seconds(list(runs.values()))
    times = dict(zip(runs, [format_seconds(first), *(f"{s - 1:+.1%}" for s in shares)], strict=True))
    rows = [
        ["", label, format_bytes(peaks[label]), f"{peaks[label] / peaks['eager']:.1%}", times[label]]
        for label in runs
    ]
    rows[0][0] = name
    return rows + [["", label, text, "", ""] for label, text in refused.items()]


def chunked(module: nn.Module, budget: int) -> nn.Module:
    """The whole module in chunks, in training."""
    twin = copy.deepcopy(module)
    twin.forward = partial(InChunks(budget, train=True), twin)
    return twin


def recomputed(module: nn.Module) -> nn.Module:
    """What a person writes: every block again in the backward pass."""
    twin = copy.deepcopy(module)
    for block in find_blocks(twin).values():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return twin


def compiled(module: nn.Module, backend: str, budget: float, *, auto_chunker: bool = False) -> nn.Module:
    """torch.compile with a budget of the partitioner; run once, because it compiles then."""
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    torch._dynamo.reset()
    twin: Any = copy.deepcopy(module)
    form = torch.compile(twin, backend=backend)

    class Once(nn.Module):
        """Compiled under the settings of its peer, at its first call."""

        def __init__(self) -> None:
            super().__init__()
            self.form = form

        def forward(self, *args: Any) -> Any:
            with (
                functorch.patch(activation_memory_budget=budget),
                inductor.patch({"auto_chunker.enable": auto_chunker}),
            ):
                return self.form(*args)

    return Once()


def tiled(module: Language) -> nn.Module:
    """What a person writes for long inputs: feed-forward, and head with loss, some words at a time."""
    twin = copy.deepcopy(module)

    def narrow(layer: Any, x: Tensor) -> Tensor:
        return layer.narrow(F.gelu(layer.wide(layer.norm_2(x))))

    def layer_forward(layer: Any, x: Tensor) -> Tensor:
        x = x + layer.out(attend(layer, x))
        tiles = [checkpoint(narrow, layer, part, use_reentrant=False) for part in x.chunk(TILES, dim=1)]
        return x + torch.cat(tiles, dim=1)

    def loss(part: Tensor, words: Tensor) -> Tensor:
        return F.cross_entropy(twin.gpt.head(part).flatten(0, 1), words.flatten(), reduction="sum")

    def forward(words: Tensor) -> Tensor:
        inner = twin.gpt.norm(twin.gpt.layers(twin.gpt.words(words)))[:, :-1]
        pairs = zip(inner.chunk(TILES, dim=1), words[:, 1:].chunk(TILES, dim=1), strict=True)
        return sum(checkpoint(loss, *pair, use_reentrant=False) for pair in pairs) / words[:, 1:].numel()

    for layer in twin.gpt.layers:
        layer.forward = partial(layer_forward, layer)
    twin.forward = forward
    return twin


def attend(layer: Any, x: Tensor) -> Tensor:
    """The mixed values of a layer's attention, written out."""
    q, k, v = (
        part.unflatten(-1, (layer.heads, -1)).transpose(1, 2)
        for part in layer.qkv(layer.norm_1(x)).chunk(3, dim=-1)
    )
    place = torch.arange(x.shape[1])
    scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(
        place[:, None] < place[None, :], float("-inf")
    )
    return (torch.softmax(scores, dim=-1) @ v).transpose(1, 2).flatten(2)
