"""Claim: what overlaps under `tensor3d` changes no number and no byte: collectives are begun earlier and waited for
later, gathered parameters are kept within a budget, ranks compare once a step, a change of order is exact or refused.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain, combinations
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import lightning_amp.techniques.tensor3d.layout_rules  # noqa: F401  (registers the rules)
from lightning_amp import AMPStrategy
from lightning_amp.errors import ModelError, PlanError
from lightning_amp.sharding._torch import AUTOGRAD_AND_AUTOCAST, excluded_keys, force_dispatch_keys, included_keys
from lightning_amp.sharding.splits import Sent
from lightning_amp.techniques.ranks.collectives import Agreement
from lightning_amp.techniques.tensor3d.grid import Grid
from lightning_amp.techniques.tensor3d.in_step import InStep
from lightning_amp.techniques.tensor3d.layouts import written
from lightning_amp.techniques.tensor3d.parameters import GridParameter
from lightning_amp.techniques.tensor3d.plan_layouts import LayoutPlanner
from lightning_amp.techniques.tensor3d.row import OVERLAP, TensorParallel3D
from lightning_amp.techniques.tensor3d.units import GridUnits
from tests.ranks import run_ranks

ALL = OVERLAP.split(",")
MIB = 2**20
SUBSETS = [",".join(names) for names in chain.from_iterable(combinations(ALL, n) for n in range(4))]
RUNS = [*zip(SUBSETS[:4], (0, 600, MIB, 0), strict=True), (OVERLAP, 0), (OVERLAP, MIB)]
"""What overlaps, none, one or all of it, and the bytes of the cache."""
STEPS = 3


class Net(nn.Module):
    """Blocks that run again, a layer that is used twice, a frozen one, and a head that is the embedding."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, width), nn.Linear(width, 7, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.twice = nn.Linear(width, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 9), nn.GELU(), nn.Linear(9, width)) for _ in range(3)
        )

    def forward(self, words: Tensor) -> Tensor:
        x = self.frozen(self.embed(words[:, :-1]))
        x = self.twice(torch.tanh(self.twice(x)))
        for i, block in enumerate(self.blocks):
            x = x + (checkpoint(block, x, use_reentrant=False) if i else block(x))
        found: Tensor = functional.cross_entropy(self.head(x).flatten(0, 1), words[:, 1:].flatten())
        return found


class Branching(nn.Module):
    """Takes one of two layers of unlike shapes, and detaches one of two losses.

    Args:
        takes: Whether the step takes the second layer, by step and place of the rank.
        detaches: As `takes`, of the second loss.
    """

    def __init__(
        self,
        takes: Callable[[int, int], bool] = lambda step, z: False,
        detaches: Callable[[int, int], bool] = lambda step, z: False,
    ) -> None:
        super().__init__()
        self.one, self.two, self.last = (
            nn.Linear(4, 4),
            nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 4)),
            nn.Linear(4, 2),
        )
        self.takes, self.detaches, self.step, self.z = takes, detaches, 0, 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.two(x) if self.takes(self.step, self.z) else self.one(x)
        more = self.last(x).square().mean()
        found: Tensor = x.mean() + (more.detach() if self.detaches(self.step, self.z) else more)
        return found


class Windows(nn.Module):
    """Attention without heads, whose last layer is cut when it is read: its three outputs are one and two of a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 6), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x[:, None].expand(-1, 3, -1)).chunk(3, -1)
        found: Tensor = self.out((q @ k.mT).softmax(-1) @ v).square().mean()
        return found


class Heads(nn.Module):
    """One head of a rank is a view of its matrices, and two are copies, when torch multiplies batches of them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.heads = nn.Linear(4, 3), nn.Parameter(torch.randn(3, 1, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x[:, None].expand(-1, 2, -1)).unflatten(-1, (3, 1)).transpose(1, 2)
        found: Tensor = (x.tanh() @ self.heads).square().mean()
        return found


class Complex(nn.Module):
    """A view of real numbers as complex ones, conjugate, of which the imaginary parts are negative."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.pairs = nn.Linear(4, 3), nn.Parameter(torch.randn(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        kernel, x = torch.view_as_complex(self.pairs).conj(), self.inner(x)
        found: Tensor = (x * kernel).real.square().mean() + (x * kernel.imag).sin().mean()
        return found


SAVED: dict[str, Any] = {"windows": (Windows, (2, 2, 1)), "heads": (Heads, (2, 1, 2)), "complex": (Complex, (2, 1, 2))}
"""Modules of which autograd saves views of parameters."""

# by step and by place in z
ALIKE: dict[str, dict[str, Any]] = {
    "every other": {"takes": lambda step, z: step % 2 == 0},
    "in the backward pass": {"detaches": lambda step, z: step == 1},
}
UNLIKE: dict[str, dict[str, Any]] = {
    "first": {"takes": lambda step, z: z == 1},
    "later in the backward pass": {"detaches": lambda step, z: (step, z) == (1, 1)},
}
SAME = "under tensor3d all ranks use the same .*"
UNLIKE_WORDS = {
    "first": SAME + "rank 0 gathers 'one.* rank 2 gathers 'two.0",
    "later in the backward pass": SAME + "rank 0 ends the backward pass.* rank 2 adds up",
}


def words() -> list[Tensor]:
    return [torch.randint(0, 7, (4, 6)) for _ in range(2 * STEPS)]


def numbers() -> list[Tensor]:
    return [torch.randn(4, 4).double() for _ in range(2 * STEPS)]


def made(
    make: Callable[[], nn.Module], batches: Callable[[], list[Tensor]], dtype: torch.dtype = torch.float64
) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    return make().to(dtype), batches()


def spec_of(module: nn.Module, batch: Tensor, grid: tuple[int, int, int], **options: Any) -> TensorParallel3D:
    planner = LayoutPlanner(list(module.named_parameters()), {"x": grid[0], "y": grid[1]})
    with planner, force_dispatch_keys(included_keys(), excluded_keys() | AUTOGRAD_AND_AUTOCAST):
        module(batch)
    return TensorParallel3D(grid="x".join(map(str, grid)), layouts=written(planner), **options)


def train(module: nn.Module, batches: list[Tensor], units: GridUnits | None = None, around: Any = nullcontext) -> None:
    """Every step has two batches."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
    for step in range(STEPS):
        for batch in batches[2 * step :][:2]:
            module.step = step  # type: ignore[assignment]
            with around():
                loss = module(batch) if units is None else units.run("training_step", module, batch)
            with nullcontext() if units is None else units.backward(loss):
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()


class OnGrid:
    """A module on a grid of ranks, trained; `compared` counts the comparisons of each step."""

    def __init__(
        self, ranks: int, grid: Grid, make: Any, batches: Any, dtype: torch.dtype = torch.float64, **options: Any
    ) -> None:
        module, given = made(make, batches, dtype)
        spec = spec_of(module, given[0], (grid.x.size, grid.y.size, grid.z.size), **options)
        agreement, self.compared = Agreement(init_device_mesh("cpu", (ranks,)), "tensor3d"), list[str]()

        def agree(what: str) -> None:
            self.compared.append(what)
            agreement.on(what)
            agreement.look()

        self.units = GridUnits(module, spec, grid, agree=agree)
        self.units.cut()
        self.module, n = module, 4 // grid.z.size
        module.z = grid.z.rank  # type: ignore[assignment]
        self.batches = [batch[grid.z.rank * n :][:n] for batch in given]

    def trained(self, around: Any = nullcontext) -> dict[str, Tensor]:
        train(self.module, self.batches, self.units, around)
        return {one.name: one.join(one.parameter.data) for one in self.units.parameters}


@contextmanager
def logged() -> Iterator[list[tuple[str, str]]]:
    """What is begun, computed and waited for, in order."""
    log = list[tuple[str, str]]()
    reduce, start, add_up = dist.all_reduce, GridParameter.start_gather, InStep.add_up
    product = functional.linear

    class Waited:
        def __init__(self, work: Any) -> None:
            self.work = work

        def wait(self) -> None:
            log.append(("waits", "all-reduce"))
            self.work.wait()

    def all_reduce(*args: Any, **kwargs: Any) -> Any:
        work = reduce(*args, **kwargs)
        # ranks compare by the largest number
        if not kwargs.get("async_op") or args[1] != dist.ReduceOp.SUM:
            return work
        log.append(("begins", "all-reduce"))
        return Waited(work)

    def start_gather(self: GridParameter) -> Callable[[], Tensor]:
        log.append(("begins", self.name))
        arrive = start(self)

        def waited() -> Tensor:
            log.append(("waits", self.name))
            return arrive()

        return waited

    def added(self: InStep, of: Any, grad: Tensor, **fresh: bool) -> None:
        log.append(("computed", of.name))
        add_up(self, of, grad, **fresh)

    def linear(*args: Any) -> Tensor:
        log.append(("computes", "layer"))
        return product(*args)

    with (
        patch.object(dist, "all_reduce", all_reduce),
        patch.object(GridParameter, "start_gather", start_gather),
        patch.object(InStep, "add_up", added),
        patch("lightning_amp.sharding.ops.products.F.linear", linear),
    ):
        yield log


def on_ranks(rank: int, ranks: int) -> dict[str, Any]:
    grid = Grid.of("cpu", (2, 1, 2), ranks)
    found: dict[str, Any] = {}
    for names, cache in RUNS:
        run = OnGrid(ranks, grid, Net, words, overlap=names, cache_bytes=cache)
        found[f"{names} {cache}"] = run.trained()
    found["compared"] = run.compared
    with logged() as log:
        OnGrid(ranks, grid, Net, words).trained()
    found["log"] = log

    def autocast() -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16)

    for names in ("", OVERLAP):
        run = OnGrid(ranks, grid, Net, words, torch.float32, overlap=names)
        found[f"bf16 {names}"] = run.trained(autocast)
    for name in (*ALIKE, *UNLIKE):
        run = OnGrid(ranks, grid, partial(Branching, **{**ALIKE, **UNLIKE}[name]), numbers)
        try:
            found[name] = run.trained()
        except ModelError as error:
            found[name] = str(error)
    for name, (make, sizes) in SAVED.items():
        found[name] = OnGrid(ranks, Grid.of("cpu", sizes, ranks), make, numbers).trained()
    return found


@pytest.mark.exhaustive
@pytest.mark.release
@pytest.mark.ranks
def test_what_overlaps_changes_no_number_and_no_promise(tmp_path: Path) -> None:
    """Accumulated over two batches; blocks run again, weights are tied, used twice, frozen."""
    module, batches = made(Net, words)
    train(module, batches)
    right = {name: p.detach() for name, p in module.named_parameters()}
    ranks = run_ranks(on_ranks, 4, tmp_path)
    for found in ranks:
        for names, cache in RUNS:
            run = f"{names} {cache}"
            torch.testing.assert_close(found[run], right, rtol=1e-10, atol=1e-10, msg=run)
        torch.testing.assert_close(found["bf16 "], found[f"bf16 {OVERLAP}"], rtol=1e-10, atol=1e-10)
        # the first batch is compared at each collective
        n = next(i for i, what in enumerate(found["compared"]) if what.startswith("ends"))
        assert n > 20
        assert all(what.startswith("ends") for what in found["compared"][n:])
        assert len(found["compared"]) - n == 2 * STEPS
        assert_overlapped(found["log"])
        for name, words_of_error in UNLIKE_WORDS.items():
            assert re.search(words_of_error, str(found[name]), re.DOTALL), (name, found[name])
    exact = {name: partial(Branching, **branches) for name, branches in ALIKE.items()}
    for name, make in {**exact, **{name: make for name, (make, _) in SAVED.items()}}.items():
        module, batches = made(make, numbers)
        train(module, batches)
        state = {key: p.detach() for key, p in module.named_parameters()}
        for found in ranks:
            torch.testing.assert_close(found[name], state, rtol=1e-10, atol=1e-10, msg=name)


def assert_overlapped(log: list[tuple[str, str]]) -> None:
    """A weight's gradient is computed while an all-reduce is under way; layers compute while the next are gathered."""
    under = [
        log[i + 1 : log.index(("waits", "all-reduce"), i)]
        for i, (what, of) in enumerate(log)
        if (what, of) == ("begins", "all-reduce")
    ]
    assert under, "every all-reduce was waited for at once"
    assert all(any(what == "computed" for what, _ in one) for one in under), "nothing was computed"
    ahead = [
        of
        for i, (what, of) in enumerate(log)
        if what == "begins" and ("computes", "layer") in log[i : log.index(("waits", of), i)]
    ]
    assert "blocks.1.1.weight" in ahead, ahead


def sent_dry(options: dict[str, Any]) -> tuple[list[tuple[str, int]], list[str]]:
    """What a rank sends in its second step, by kind and bytes, and the parameters that it gathers."""
    module, batches = made(Net, words)
    sent = list[Sent]()
    grid = Grid.dry((2, 1, 2), sent=sent)
    spec = spec_of(module, batches[0], (2, 1, 2), **options)
    units = GridUnits(module, spec, grid, begun=True)
    units.cut()
    for batch in batches[:2]:
        sent.clear()
        with logged() as log:
            loss = units.run("training_step", module, batch)
            with units.backward(loss):
                loss.backward()
    return sorted((one.kind, one.n_bytes) for one in sent), [of for what, of in log if what == "begins"]


def test_flags_send_the_same_and_a_cache_spares_gathers() -> None:
    sent, gathered = sent_dry({"overlap": ""})
    for names in SUBSETS:
        assert sent_dry({"overlap": names})[0] == sent, names
    some, all_kept = (sent_dry({"cache_bytes": cache}) for cache in (600, MIB))
    assert len(gathered) > len(some[1]) > len(all_kept[1]) == len(set(gathered)), "each once"
    for fewer, _ in (some, all_kept):
        assert len(fewer) < len(sent)
        assert [one for one in fewer if one[0] != "all_gather"] == [one for one in sent if one[0] != "all_gather"]


def test_options_of_overlap_are_checked() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tensor_overlap": ("all_reduce", "gather")}, "'gather'.*allowed are none or some of 'all_reduce'"),
        ({"tensor_overlap": "all_reduce"}, "as a tuple"),
        ({"tensor_cache": "much"}, "is not a memory size"),
        ({"tensor_cache": "-1MiB"}, "is not a memory size"),
    ]
    for options, words_of_error in cases:
        with pytest.raises(PlanError, match=words_of_error):
            AMPStrategy(strategies="tensor3d", tensor_grid=(1, 1, 2), **options)
    for other in ({"tensor_overlap": ()}, {"tensor_cache": "1MiB"}):
        with pytest.raises(PlanError, match="is an option of tensor3d"):
            AMPStrategy(**other)  # type: ignore[arg-type]
    AMPStrategy(strategies="tensor3d", tensor_grid=(1, 1, 2), tensor_overlap=(), tensor_cache=0)
    # as a command line gives the default of a strategy without it
    AMPStrategy(strategies="S1", tensor_overlap=ALL)
