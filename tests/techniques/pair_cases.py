"""A module whose blocks are single layers, techniques on them in pairs, and one run of each, in float64.

`trained(None)` is one process with the union of the ranks' cells under Lightning's own strategy.
"""

import copy
import logging
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_amp.costs.rule import Rule
from lightning_amp.errors import AmpError
from lightning_amp.footprint.find_blocks import blocks_with_own_parameters
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.techniques.chunk.row import ChunkBlock
from lightning_amp.techniques.chunk.run.in_chunks import InChunks
from lightning_amp.techniques.contract.change import Change
from lightning_amp.techniques.fsdp.row import FullyShard
from lightning_amp.techniques.recompute.recompute import RecomputedForward
from lightning_amp.techniques.recompute.row import RecomputeBlock
from lightning_amp.techniques.register_technique import register_technique
from lightning_amp.techniques.table import STRATEGIES, in_order
from tests.any_module import QUIET
from tests.lightning.strategy.strategy_cases import RunningRanks
from tests.lightning.strategy.test_fsdp import Record
from tests.optimised import Optimised
from tests.techniques import ran

WIDE, CELLS, STEPS = 4, (5, 3), 3
"""Channels, cells of each rank, and steps."""


def conv(norm: nn.Module, act: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv1d(WIDE, WIDE, 3, padding=1), norm, act)


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "1d": lambda: nn.BatchNorm1d(WIDE),
    "2d": lambda: nn.BatchNorm2d(WIDE),
    "3d": lambda: nn.BatchNorm3d(WIDE),
    "untracked": lambda: nn.BatchNorm1d(WIDE, affine=False, track_running_stats=False),
    "frozen": lambda: nn.BatchNorm1d(WIDE).eval(),
    "frozen, untracked": lambda: nn.BatchNorm1d(WIDE, track_running_stats=False).eval(),
    "synchronised, frozen": lambda: nn.SyncBatchNorm(WIDE).eval(),
    "convolution": lambda: conv(nn.BatchNorm1d(WIDE), nn.ReLU(inplace=True)),
    "frozen convolution": lambda: conv(nn.BatchNorm1d(WIDE).eval(), nn.Softplus()),
    "rectifier in place": lambda: nn.ReLU(inplace=True),
    "dropout": lambda: nn.Dropout(0.3),
    "tied": lambda: nn.Linear(6, 6),
    "twice": lambda: nn.Sequential(nn.Conv1d(WIDE, WIDE, 1), nn.BatchNorm1d(WIDE)),
    "1d, twice": lambda: nn.BatchNorm1d(WIDE),
}
NAMES = {kind: f"blocks.{i}" for i, kind in enumerate(BLOCKS)}
SHAPES = {"2d": (3, 2), "3d": (3, 1, 2)}


class Zoo(Optimised, by=torch.optim.SGD, lr=0.1, momentum=0.9):
    """Calls every block, some of them twice; the weight of one is that of the head, too.

    Args:
        rank: None draws what all ranks draw, each for its cells.
    """

    def __init__(self, rank: int | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rank = rank
        self.stem = nn.Conv1d(WIDE, WIDE, 1)
        self.blocks = nn.ModuleList(make() for make in BLOCKS.values())
        self.head = nn.Linear(6, 6)
        self.head.weight = self.blocks[list(BLOCKS).index("tied")].weight
        self.double()

    def drop(self, block: nn.Module, x: Tensor, step: int) -> Tensor:
        if self.rank is not None:
            torch.manual_seed(10 * step + self.rank)
            return block(x)
        found = []
        for rank, part in enumerate(x.split(CELLS)):
            torch.manual_seed(10 * step + rank)
            found.append(block(part))
        return torch.cat(found)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.stem(batch)
        for kind, block in zip(BLOCKS, self.blocks, strict=True):
            if kind in SHAPES:
                x = block(x.unflatten(-1, SHAPES[kind])).flatten(2)
            elif kind == "dropout":
                x = self.drop(block, x, batch_idx)
            else:
                x = block(block(x).sin() if kind.endswith("twice") else x)
            x = x + 0.1 * batch
        loss = F.mse_loss(self.head(x), batch.flip(1))
        self.log("loss", loss)
        return loss


@dataclass(frozen=True)
class Replaced:
    """A rule's spec of a technique that replaces modules."""


@dataclass(frozen=True)
class Overridden:
    """A rule's spec of a technique that overrides forwards."""


class SameLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        ran.note("S6")
        return input @ self.weight.T + self.bias


class SameNorm(nn.BatchNorm1d):
    pass


class SameSequential(nn.Sequential):
    def forward(self, input: Any) -> Any:
        for module in self:
            input = module(input)
        return input


def replace_by_same(module: nn.Module, spec: Any, mesh: Any) -> nn.Module:
    kinds = {nn.Linear: SameLinear, nn.BatchNorm1d: SameNorm, nn.Sequential: SameSequential}
    twin = copy.copy(module)
    twin.__class__ = kinds[type(module)]
    return twin


def same_forward(module: nn.Module, *args: Any) -> Any:
    ran.note("S7")
    return type(module).forward(module, *args)


def override_by_same(module: nn.Module, spec: Any, mesh: Any) -> Change:
    return Change({}, forwards={"": same_forward})


def register() -> None:
    for name, spec, install in (("S6", Replaced, replace_by_same), ("S7", Overridden, override_by_same)):
        if name not in STRATEGIES:
            register_technique(
                name, title=name, shrinks="nothing", spec=spec, targets=lambda shape: [], install=install
            )


CHUNKED = ("frozen", "synchronised, frozen", "frozen convolution", "dropout", "tied")
"""All that train by no statistics of a batch, and compute nothing in place."""
ON: dict[str, tuple[Any, Iterable[str]]] = {
    "recompute": (RecomputeBlock(), [kind for kind in BLOCKS if kind != "rectifier in place"]),
    "chunk": (ChunkBlock(budget_bytes=1), CHUNKED),
    "S6": (Replaced(), ("1d", "frozen", "convolution", "frozen convolution", "tied", "twice", "1d, twice")),
    "S7": (Overridden(), ("frozen convolution", "tied", "rectifier in place", "dropout", "twice")),
    "fsdp": (FullyShard(), ()),
}
"""Of a technique its spec, and the blocks that it can be on."""
TOGETHER = [set[str](), {"recompute", "chunk", "S6", "fsdp"}, {"recompute", "S6", "S7", "fsdp"}, {"chunk"}, {"S7"}]
"""Every pair that can be, but chunk with S7, which exclude each other; these two also alone."""
ALONE = [{name} for name in ("recompute", "S6", "fsdp")]
PAIRS = [{*pair} for pair in combinations(ON, 2) if {*pair} != {"chunk", "S7"}]
COMBINED = {True: TOGETHER, False: [*TOGETHER, *ALONE, *PAIRS]}
"""Few of them, and all."""


def rules(name: str, module: nn.Module, kinds: Iterable[str] = ()) -> list[Rule]:
    """Of a technique on some blocks, or on all that it can be on."""
    spec, found = ON[name]
    names = [*blocks_with_own_parameters(module), ""] if name == "fsdp" else [NAMES[kind] for kind in kinds or found]
    return [Rule(fqn=fqn, spec=spec, strategy=name, why="a test") for fqn in names]


def with_rules(plan: Plan, names: Iterable[str], module: nn.Module) -> Plan:
    strategies = in_order({*plan.strategies, *names})
    whole = [*plan.rules, *(rule for name in names for rule in rules(name, module))]
    whole.sort(key=lambda rule: strategies.index(rule.strategy))
    return replace(plan, strategies=strategies, rules=tuple(whole))


def batches(rank: int | None) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    made = [1 + torch.randn(sum(CELLS), WIDE, 6, generator=draw, dtype=torch.float64) for _ in range(STEPS)]
    return made if rank is None else [batch.split(CELLS)[rank] for batch in made]


def attributes(module: nn.Module) -> dict[str, list[Any]]:
    """All that every part of a module holds, in order, with its class; Lightning adds to the whole."""
    return {
        name: [type(part), *((k, [*v.items()] if isinstance(v, dict) else v) for k, v in vars(part).items())]
        for name, part in module.named_modules()
        if name
    }


def trained(rank: int | None, strategy: Any = "auto") -> tuple[dict[str, Any], Any]:
    module, record = Zoo(rank), Record()
    before = attributes(module)
    ran.NAMES.clear()
    ranks: dict[str, Any] = {} if rank is None else {"plugins": [RunningRanks(rank, 2)], "devices": 2}
    trainer = Trainer(
        **QUIET, **ranks, accelerator="cpu", strategy=strategy, max_epochs=1, use_distributed_sampler=False,
        callbacks=[record],
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(batches(rank), batch_size=None))  # type: ignore[arg-type]
    told = [str(one.message) for one in seen if "differ between ranks" in str(one.message)]
    found = {
        "ran": {*ran.NAMES},
        "losses": torch.stack(record.losses),
        "gradients": record.gradients,
        "state": {name: value.clone() for name, value in module.state_dict().items()},
        "warnings": told,
        "changed": [name for name, held in attributes(module).items() if held != before[name]],
    }
    return found, getattr(trainer.strategy, "plan", None)


def pairs(rank: int, ranks: int, few: bool) -> list[dict[str, Any]]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    register()
    _, plan = trained(rank, AMPStrategy(strategies="S1"))
    make = partial(with_rules, plan, module=Zoo(rank))
    with noted("recompute", RecomputedForward), noted("chunk", InChunks):
        return [trained(rank, AMPStrategy(plan=make(names)))[0] for names in COMBINED[few]]


class Line(Optimised, by=torch.optim.SGD, lr=0.1, momentum=0.9):
    """What stages can run: nothing that knows of other cells."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6), nn.Linear(6, 6)])
        self.double()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()


STAGED = [("recompute",), ("chunk",), ("recompute", "chunk"), ("S6",), ("S7",), ("fsdp",)]


def staged(rank: int | None, strategy: Any = "auto") -> tuple[dict[str, Tensor], Any]:
    """Parameters after a run in stages on two ranks, and its plan."""
    module = Line()
    ranks: dict[str, Any] = {} if rank is None else {"plugins": [RunningRanks(rank, 2)], "devices": 2}
    trainer = Trainer(**QUIET, **ranks, accelerator="cpu", strategy=strategy, max_epochs=1)
    trainer.fit(module, DataLoader(batches(None), batch_size=None))  # type: ignore[arg-type]
    return {name: p.detach().clone() for name, p in module.named_parameters()}, trainer.strategy


def pairs_in_stages(rank: int, ranks: int) -> list[Any]:
    """What is trained with other techniques on the blocks of a pipeline, or why it is refused."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    register()
    plan, found = staged(rank, AMPStrategy(strategies="pipeline", micro_batches=2))[1].plan, list[Any]()
    for names in STAGED:
        strategies = in_order({*plan.strategies, *names})
        own = [
            Rule(fqn=fqn, spec=ON[name][0], strategy=name, why="a test")
            for name in names
            for fqn in ([""] if name == "fsdp" else ["blocks.0", "blocks.2"])
        ]
        whole = sorted((*plan.rules, *own), key=lambda rule: strategies.index(rule.strategy))
        try:
            asked = replace(plan, strategies=strategies, rules=tuple(whole))
            found.append(staged(rank, AMPStrategy(plan=asked))[0])
        except AmpError as error:
            found.append(str(error))
    return found


def noted(name: str, kind: type) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        ran.note(name)
        return plain(*args, **kwargs)

    plain = kind.__call__
    return patch.object(kind, "__call__", call)
