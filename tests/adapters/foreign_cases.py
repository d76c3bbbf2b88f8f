"""What one process or several ranks run for the tests beside: a user's module under every way to share its decoder.

`trained(...)` is one fit; `PLANS` are the strategies that a number of ranks can be asked for.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_amp.adapters.adapt import adapt
from lightning_amp.errors import InstallError, ModelError
from lightning_amp.installing.install import install
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from tests.adapters.higlue_shaped import Copy, Foreign, cells
from tests.lightning.strategy.strategy_cases import trainer_of
from tests.models import unit_cases
from tests.techniques.sharded_cases import make_plan, model_mesh

STEPS = 5
PLANS = (
    "S1,S2,S3,stream", "S1,S2,fused,recompute", "S1,S3,S4,S5", "S1,S2,S5,stream", "S1,fused,sparse,stream,strata",
    "S1,S4,nodes,stream", "S1,fused,nodes",
)  # fmt: skip
"""Every placement, kind of attention and way of keeping activations once at least."""
Found = dict[str, Any]


class Plain(Foreign):
    """One optimizer, and no step that reads a value: it is counted under every plan."""

    def __init__(self, copy: Copy) -> None:
        super().__init__(copy)
        del self.critic
        self.automatic_optimization = True

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:  # type: ignore[override]
        u = self.encoder(batch["x"].log1p())
        return -self.decoder(u, self.anchors, batch["b"], batch["l"]).log_prob(batch["x"]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


COUNTED: dict[str, dict[str, Any]] = {
    "S2": {"strategies": ["S1", "S2"], "model_parallel_size": 2},
    "S5": {"strategies": ["S1", "S3", "S4", "S5"], "model_parallel_size": 2},
    "a budget": {"device_memory": "200MiB"},
}
"""Requests of `counted`."""


def possible(strategies: str, *, attention: bool, binarize: bool) -> str:
    """Those of them that a decoder can have; "" where the placement is not among these."""
    if not attention and "nodes" in strategies:
        return ""
    left_out = {"fused", "S3"} if not attention else set()
    left_out |= {"sparse"} if binarize else set()
    return ",".join(s for s in strategies.split(",") if s not in left_out)


def trained(
    module: LightningModule,
    batches: Sequence[Any],
    strategies: str | None,
    *,
    rank: int = 0,
    ranks: int = 1,
    precision: Any = "64-true",
) -> dict[str, Tensor]:
    """What is trained after a fit; None is Lightning's own strategy for one device."""
    strategy: Any = "auto"
    if strategies is not None:
        model = {"model_parallel_size": ranks} if ranks > 1 else {}
        strategy = AMPStrategy(strategies=strategies.split(","), **model)
    fit(module, batches, strategy, rank=rank, ranks=ranks, precision=precision)
    if strategies is not None:
        assert set(strategy.plan.strategies) == set(strategies.split(",")), "what was asked for was installed"
    return values(module)


def fit(module: LightningModule, batches: Sequence[Any], strategy: Any, **options: Any) -> None:
    trainer = trainer_of(strategy, max_steps=-1, use_distributed_sampler=False, **options)
    with warnings.catch_warnings(action="ignore"):
        trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]


def values(module: LightningModule) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items() if value.is_floating_point()}


def batches(copy: Copy) -> list[dict[str, Tensor]]:
    return [cells(copy, seed=step) for step in range(STEPS)]


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference by norm, of any parameter or buffer."""
    assert list(found) == list(expected), "the same names"
    return max(float((found[name] - value).norm() / value.norm().clamp_min(1e-3)) for name, value in expected.items())


def every_plan(rank: int, ranks: int, copies: dict[str, Copy], *, few: bool = False) -> dict[tuple[str, str], float]:
    """How far every plan's parameters are from those of one device, for every copy, or few: for one of them in turn."""
    found = {}
    for turn, (name, copy) in enumerate(copies.items()):
        expected = trained(Foreign(copy), batches(copy), None)
        start = Foreign(copy).state_dict()
        assert differences(expected, start) > 1e-2, "the steps change something"
        for plan in PLANS[turn :: len(copies)] if few else PLANS:
            strategies = possible(plan, attention=copy.attention, binarize=copy.binarize)
            if strategies:
                state = trained(Foreign(copy), batches(copy), strategies, rank=rank, ranks=ranks)
                found[name, strategies] = differences(state, expected)
    return found


def example(kind: Copy) -> tuple[Foreign, tuple[Tensor, Tensor, Tensor, Tensor], Tensor]:
    module, batch = Foreign(kind), cells(kind)
    u = torch.randn(6, kind.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    given = u.requires_grad_(), module.anchors, batch["b"], batch["l"].requires_grad_()
    return module, given, batch["x"]


def in_full(ranks: int) -> dict[str, Any]:
    """Where ranks share the strata."""
    found: dict[str, Any] = {}
    for placement in ("S2", "strata", "nodes", "S5"):
        module, given, x = example(Copy(strata=3))
        with torch.no_grad():
            eager = module.decoder(*given)
            expected = [eager.log_prob(x), eager.mean, eager.sample().shape]
        adapt(module)
        install(module, make_plan([placement], ranks), model_mesh(ranks))
        new = module.decoder(*given)
        try:
            new.log_prob(x).sum(1)
        except InstallError as error:
            found[f"{placement} refuses"] = str(error)
        with torch.no_grad():
            whole = [new.log_prob(x)[:, :], new.mean, new.sample().shape]
        found[placement] = [
            a == b if isinstance(a, torch.Size) else float((a - b).norm() / b.norm())
            for a, b in zip(whole, expected, strict=True)
        ]
        if placement == "nodes":
            more = torch.cat([given[1], given[1][:1]])
            try:
                module.decoder(given[0], more, given[2], given[3]).log_prob(x).sum()
            except ModelError as error:
                found["anchors"] = str(error)
    return found


def counted(rank: int, ranks: int, copy: Copy) -> dict[str, tuple[float, bool]]:
    """How far each fit is from one device, and whether its step was counted."""
    whole = Plain(copy)
    fit(whole, batches(copy), "auto", precision="64-true")
    found = {}
    for name, request in COUNTED.items():
        module, strategy = Plain(copy), AMPStrategy(**request)
        fit(module, batches(copy), strategy, rank=rank, ranks=ranks, precision="64-true")
        found[name] = differences(values(module), values(whole)), strategy.plan.diagnosis is not None
    return found


def units(rank: int, ranks: int) -> dict[str, float]:
    """How far a decoder of the user's own is from one device."""
    expected = trained(unit_cases.Counts(), unit_cases.batches(), None)
    found = {}
    for strategies in ("S1,stream", "S1,recompute") if ranks == 1 else ("S1,strata", "S1,stream,strata"):
        state = trained(unit_cases.Counts(), unit_cases.batches(), strategies, rank=rank, ranks=ranks)
        found[strategies] = differences(state, expected)
    return found


def everything(rank: int, ranks: int, copies: dict[str, Copy], few: bool) -> Found:
    with warnings.catch_warnings(action="ignore"):
        return {
            "plans": every_plan(rank, ranks, copies, few=few),
            "in full": in_full(ranks),
            "units": units(rank, ranks),
        }
