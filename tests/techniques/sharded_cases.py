"""Tiny decoders, their unsharded results and the same under strategies, for tests of what shares a decoder over ranks.

    expected = reference(case, steps)                                 on one device
    found = sharded(case, ("S3", "S5"), model_mesh(world_size), steps)   on every rank
    assert_same(found, expected)

Results hold the losses, the gradients of the first step (u and v included), all values after the steps and the mean.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_amp.costs.rule import Rule, Spec
from lightning_amp.installing.install import Installed, install
from lightning_amp.models.decoders.stratified import KeyKind, StratifiedDecoder
from lightning_amp.models.decoders.stratum_keys import Variant
from lightning_amp.planning.plan.mesh_shape import MeshShape
from lightning_amp.planning.plan.plan import Axes, Plan
from lightning_amp.techniques.compile.row import CompileStrata
from lightning_amp.techniques.hic.rows import (
    ChunkedAttention,
    DomainParallel,
    FeatureParallel,
    FusedAttention,
    HiddenParallel,
    KeyFirstDecode,
    SdpaAttention,
    SparseLikelihood,
    StrataParallel,
    StreamStrata,
)
from lightning_amp.techniques.recompute.row import RecomputeStrata

RTOL = 1e-10
FLOOR = 1e-14
"""Difference by norm that counts as none, for values that are zero on one device."""

TARGETS: dict[str, tuple[str, Spec]] = {
    "S2": ("decoder", FeatureParallel()),
    "S3": ("decoder.strata.*.key.attention", ChunkedAttention(buckets=2)),
    "S4": ("decoder.strata.*.decode", KeyFirstDecode()),
    "S5": ("decoder", HiddenParallel()),
    "fused": ("decoder.strata.*.key.attention", FusedAttention()),
    "sdpa": ("decoder.strata.*.key.attention", SdpaAttention()),
    "sparse": ("decoder.strata.*.likelihood", SparseLikelihood()),
    "nodes": ("decoder", DomainParallel()),
    "recompute": ("decoder", RecomputeStrata()),
    "stream": ("decoder", StreamStrata(cells=3)),
    "compile": ("decoder", CompileStrata()),
    "strata": ("decoder", StrataParallel(ends="1,3")),
}
Results = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A decoder and a batch; `features` overrides how many of its first anchors a stratum has, by its position."""

    key: KeyKind = "attention"
    variant: Variant = "higlue"
    chained: bool = False
    dim: int = 12
    anchors: int = 23
    window: int = 5
    distances: tuple[int, ...] = (0, 1, 3)
    features: Mapping[int, int] = field(default_factory=dict)
    n_batches: int = 2
    cells: int = 4
    head: bool = True
    binarized: bool = False
    seed: int = 0

    def nodes(self) -> list[list[int]]:
        """Anchors of every stratum; the last but one of each is left out, so that they are no run."""
        every = [list(range(self.anchors - k)) for k in self.distances]
        gaps = [rows[:-2] + rows[-1:] for rows in every]
        return [rows[: self.features.get(i, len(rows))] for i, rows in enumerate(gaps)]


class Model(nn.Module):
    """A decoder with its inputs as parameters, and terms of u and v that every rank computes in full."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.decoder = decoder(case)
        u, v, self.batch = inputs(case)
        self.u, self.v = nn.Parameter(u), nn.Parameter(v)

    def forward(self) -> Tensor:
        outside = 0.1 * self.u.square().mean() + 0.1 * self.v.square().mean()
        loss: Tensor = self.decoder(self.u, self.v, **self.batch)
        return loss + outside

    def mean(self) -> Tensor:
        arguments = {name: self.batch[name] for name in ("batch", "library")}
        with torch.no_grad():
            return self.decoder.predicted(self.u, self.v, **arguments)


def decoder(case: Case) -> StratifiedDecoder:
    """The decoder of a case in float64, no parameter at a value where a mistake would not show."""
    module = StratifiedDecoder(
        case.dim,
        case.nodes(),
        stratum_index=case.distances,
        n_anchors=case.anchors,
        n_batches=case.n_batches,
        key=case.key,
        variant=case.variant,
        chained=case.chained,
        window=None if case.key == "full_attention" else case.window,
        strata_weight_head=case.head,
        binarized=case.binarized,
    ).double()
    generator = torch.Generator().manual_seed(case.seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
            parameter.copy_(noise * (0.4 if parameter.dim() > 1 else 0.3) + (1.0 if "norm.weight" in name else 0))
    return module


def inputs(case: Case) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """u, v and the rest of a batch as the decoder's keyword arguments."""
    generator = torch.Generator().manual_seed(case.seed + 1)
    u, v = (torch.randn(n, case.dim, dtype=torch.float64, generator=generator) for n in (case.cells, case.anchors))
    n_features = sum(map(len, case.nodes()))
    x = torch.poisson(torch.full((case.cells, n_features), 0.7, dtype=torch.float64), generator=generator)
    batch = torch.arange(case.cells) % case.n_batches
    return u, v, {"batch": batch, "library": x.sum(1, keepdim=True) + 1, "x": x}


def model_mesh(world_size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (1, world_size), mesh_dim_names=("data", "model"))


def fake_mesh(*, rank: int, ranks: int) -> DeviceMesh:
    """A mesh of ranks that do not exist; collectives return at once."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    return model_mesh(ranks)


def mean_gradients(case: Case, strategies: Sequence[str] = (), mesh: DeviceMesh | None = None) -> Results:
    """Gradients of a loss of the mean, which every rank computes in full; every parameter in it has one."""
    model = Model(case)
    installed = None if mesh is None else install(model, make_plan(strategies, mesh["model"].size()), mesh)
    arguments = {name: model.batch[name] for name in ("batch", "library")}
    mean = model.decoder.predicted(model.u, model.v, **arguments)
    (mean * torch.linspace(-1, 2, mean.numel()).view_as(mean)).sum().backward()  # type: ignore[no-untyped-call]
    sum_partial(installed, mesh)
    return {n: p.grad for n, p in model.named_parameters() if "theta" not in n and "zi" not in n}  # type: ignore[misc]


def make_plan(strategies: Sequence[str], ranks: int, specs: Mapping[str, Spec] | None = None) -> Plan:
    """A plan for `Model` with one rule per strategy, in their order; `specs` replaces a strategy's usual spec."""
    chosen = {s: (TARGETS[s][0], (specs or {}).get(s, TARGETS[s][1])) for s in strategies}
    rules = [Rule(fqn=fqn, spec=spec, strategy=s, why="test") for s, (fqn, spec) in chosen.items()]
    return plan_of(rules, strategies, ranks)


def plan_of(rules: Sequence[Rule], strategies: Sequence[str], ranks: int, batch_size: int = 1) -> Plan:
    """A plan with such rules, which predicts nothing."""
    return Plan(
        policy="strategies",
        signals=(),
        evidence=(),
        strategies=tuple(strategies),
        mesh=MeshShape(data=1, model=ranks),
        axes=Axes.of(strategies, (rule.spec for rule in rules)),
        rules=tuple(rules),
        batch_size=batch_size,
        predicted_base_bytes=0,
        predicted_stratum_bytes=0,
        predicted_peak_bytes=0,
        strata_bytes=(),
        budget_bytes=None,
    )


def reference(case: Case, steps: int = 3) -> Results:
    """Results on one device."""
    return train(Model(case), steps)


def sharded(
    case: Case, strategies: Sequence[str], mesh: DeviceMesh, steps: int = 3, *, specs: Mapping[str, Spec] | None = None
) -> Results:
    """Results with strategies installed; every rank of the mesh must call it."""
    model, ranks = Model(case), mesh["model"].size()
    ends = [len(case.distances) * (r + 1) // ranks for r in range(ranks)]
    dealt: dict[str, Spec] = {"strata": StrataParallel(ends=",".join(map(str, ends)))}
    plan = make_plan(strategies, ranks, dealt | dict(specs or {}))
    return train(model, steps, install(model, plan, mesh), mesh)


def train(model: Model, steps: int, installed: Installed | None = None, mesh: DeviceMesh | None = None) -> Results:
    """Some steps of RMSprop."""
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)
    results: Results = {}
    for step in range(steps):
        optimizer.zero_grad()
        loss = model()
        loss.backward()  # type: ignore[no-untyped-call]
        sum_partial(installed, mesh)
        results[f"loss of step {step}"] = loss.detach()
        if step == 0:
            results |= {f"gradient of {name}": gradient(p).clone() for name, p in model.named_parameters()}
        optimizer.step()
    results |= {f"trained {name}": p.detach() for name, p in model.named_parameters()}
    return results | {"mean": model.mean()}


def sum_partial(installed: Installed | None, mesh: DeviceMesh | None) -> None:
    """Sum the gradients of which every rank has a part, as the strategy does after backward."""
    if installed is None or mesh is None:
        return
    for parameter in installed.partial:
        parameter.grad = gradient(parameter)
        dist.all_reduce(parameter.grad, group=mesh.get_group("model"))


def gradient(parameter: nn.Parameter) -> Tensor:
    """The gradient, zeros where there is none."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def differences(found: Results, expected: Results, rtol: float = RTOL) -> list[str]:
    """What differs by more than `rtol` of the norm."""
    assert list(found) == list(expected), "the same results under the same names"
    wrong = []
    for name, value in expected.items():
        assert found[name].shape == value.shape, name
        error, norm = (found[name] - value).norm(), value.norm()
        if not error <= rtol * norm + FLOOR:
            wrong.append(f"{name}: off by {error / norm:.1e} of {norm:.3g}")
    return wrong


def assert_same(found: Results, expected: Results, rtol: float = RTOL) -> None:
    """Fail with everything that differs."""
    wrong = differences(found, expected, rtol)
    assert not wrong, "\n".join(wrong)
