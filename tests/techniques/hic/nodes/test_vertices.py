"""Claim: under nodes the whole reference model trains, saves and predicts what one device does, while no rank has a row
for every vertex or anchor; a rank's peak is its part; what would not see all that it needs is refused.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_amp.costs.model_shape import reference_shape
from lightning_amp.costs.rule import Rule
from lightning_amp.errors import InstallError
from lightning_amp.installing.describe_module import describe
from lightning_amp.installing.install import Installed, change_of, install
from lightning_amp.models import graph_encoder as vertices
from lightning_amp.models.glue import GLUE
from lightning_amp.models.inputs import GraphInputs, ModalityInputs, ModelInputs, StrataInputs
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.policies.make_plan import plan
from lightning_amp.profiling.profile import GraphProfile, Profile
from lightning_amp.simulation.models_without_values import reference_subject
from lightning_amp.simulation.simulate import simulate
from lightning_amp.techniques.hic.nodes.graph_encoder import shard_vertices, share_vertices
from lightning_amp.techniques.hic.rows import FeatureParallel, VertexParallel
from lightning_amp.techniques.ranks.sharded_region import check_region
from lightning_amp.techniques.ranks.shards import shard_anchors
from lightning_amp.techniques.table import targets_of
from tests.planning.profiles import hic, profile, rna
from tests.ranks import CountCollectives, run_ranks
from tests.techniques.sharded_cases import Results, differences, fake_mesh, model_mesh, plan_of

N, G, DIM, WINDOW = 23, 9, 6, 5
V = N + G + 1
CELLS = 4


@dataclass(frozen=True, kw_only=True)
class Graph:
    """What is varied of the data."""

    in_order: bool = False
    seed: int = 0


def inputs(case: Graph) -> ModelInputs:
    """Anchors in a chain with loops, every gene but the last joined to two anchors, some edges of sign -1."""
    generator = torch.Generator().manual_seed(case.seed)
    order = torch.arange(V) if case.in_order else torch.randperm(V, generator=generator)
    anchors, genes = order[:N], order[N : N + G]
    near = torch.arange(G - 1) * 5 % N
    pairs = [
        (anchors, anchors),
        (anchors[:-1], anchors[1:]),
        (anchors[: N // 2], anchors[N // 2 : 2 * (N // 2)]),
        (genes[:-1], anchors[near]),
        (anchors[(near + 1) % N], genes[:-1]),
    ]
    source, target = (torch.cat(ends) for ends in zip(*pairs, strict=True))
    sign = torch.where(torch.rand(len(source), generator=generator) < 0.3, -1.0, 1.0)
    nodes = [torch.arange(N - k).numpy() for k in (0, 1, 3)]
    return ModelInputs(
        modalities={
            "hic": ModalityInputs(n_features=sum(map(len, nodes)), n_batches=2, vertices=anchors.numpy()),
            "rna": ModalityInputs(n_features=G, n_batches=1, vertices=genes.numpy()),
        },
        strata=StrataInputs(n_anchors=N, nodes=nodes, distances=[0, 1, 3]),
        graph=GraphInputs(
            n_vertices=V,
            source=source.numpy(),
            target=target.numpy(),
            weight=(0.1 + 0.9 * torch.rand(len(source), generator=generator)).numpy(),
            sign=sign.numpy(),
        ),
    )


def make(case: Graph, *, edges_per_step: int = 6, negatives_per_edge: int = 3) -> GLUE:
    """The model in float64; its draws of edges are few."""
    torch.manual_seed(5)
    few = {"edges_per_step": edges_per_step, "negatives_per_edge": negatives_per_edge}
    model = GLUE(DIM, 7, window=WINDOW, align_burnin=0, **few)
    return model.build(inputs(case)).double()


def batch(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(100 + step)
    found = {}
    for name, n_features in (("hic", 3 * N - 4), ("rna", G)):
        x = torch.poisson(torch.full((CELLS, n_features), 1.5, dtype=torch.float64), generator=generator)
        found[name] = {
            "x": x,
            "library": x.sum(1, keepdim=True) + 1,
            "batch": torch.arange(CELLS) % (2 if name == "hic" else 1),
            "index": torch.arange(CELLS),
            "draw": torch.randint(2**31, (CELLS,), generator=generator),
        }
    return found


def plan_for(model: GLUE, strategies: Sequence[str], ranks: int) -> Plan:
    """A plan with the rules that planning makes of the module itself."""
    shape = describe(model, batch_size=CELLS)
    rules = [
        Rule(fqn=fqn, spec=spec, strategy=strategy, why="test")
        for strategy in strategies
        for fqn, spec in targets_of(strategy, shape)
        # a decoder whose anchors are split has its features split by them
        if not isinstance(spec, FeatureParallel)
    ]
    return plan_of(rules, strategies, ranks, CELLS)


def train(case: Graph, mesh: DeviceMesh | None = None, strategies: Sequence[str] = (), steps: int = 2) -> Results:
    """Losses, gradients of the first step, values after the last, and a validation; whole on every rank."""
    model = make(case)
    installed = Installed() if mesh is None else install(model, plan_for(model, strategies, mesh["model"].size()), mesh)
    trained = Loop(model, installed, mesh)
    for step in range(steps):
        model.training_step(batch(step), step)
    return trained.results()


class Loop:
    """What Lightning and the strategy do around a training step."""

    def __init__(self, model: GLUE, installed: Installed, mesh: DeviceMesh | None) -> None:
        self.model, self.installed, self.mesh = model, installed, mesh
        self.found: Results = {}
        optimizers = model.configure_optimizers()
        for optimizer in optimizers:
            # a gradient that is rounding alone is not to become a step
            optimizer.param_groups[0]["eps"] = 1e-4
        torch.manual_seed(11)
        hooks: dict[str, Any] = {
            "optimizers": lambda: optimizers,
            "manual_backward": self.backward,
            "log": lambda *_, **__: None,
            "log_dict": lambda *_, **__: None,
            "all_gather": lambda value: value[None],
        }
        for name, hook in hooks.items():
            setattr(model, name, hook)

    def backward(self, loss: Tensor) -> None:
        check_region(loss, self.model, partial=self.installed.partial, sharded=self.installed.sharded)
        loss.backward()  # type: ignore[no-untyped-call]
        for parameter in self.installed.partial if self.mesh is not None else ():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=self.mesh.get_group("model"))
        step = len([name for name in self.found if name.startswith("loss")])
        self.found[f"loss {step}"] = loss.detach()
        self.found |= {
            f"gradient {step} of {name}": value.clone() for name, value in self.whole("grad").items() if step == 1
        }

    def whole(self, what: str) -> Results:
        """Every parameter, or its gradient, of the size that it has on one device."""
        shards = {id(parameter.shard): parameter for parameter in self.installed.sharded}
        found = {}
        for name, parameter in self.model.named_parameters():
            value = parameter.detach() if what == "values" else parameter.grad
            if value is not None:
                found[name] = shards[id(parameter)].join(value) if id(parameter) in shards else value
        return found

    def results(self) -> Results:
        """All that was found, with the trained values and what the trained model says of other cells."""
        self.found |= {f"trained {name}": value.clone() for name, value in self.whole("values").items()}
        model = self.model.eval()
        with torch.no_grad():
            model.on_validation_epoch_start()
            model.validation_step(batch(7), 0)
            logged: dict[str, Tensor] = {}
            model.log = lambda name, value, **_: logged.update({name: value})  # type: ignore[method-assign]
            model.on_validation_epoch_end()
            for name in ("hic", "rna"):
                self.found[f"imputed {name}"] = model.impute(name, batch(7)[name])
        return self.found | logged | {"validated": model._validated}


OURS = ("S4", "fused", "sparse", "nodes", "stream")
CASES: dict[str, tuple[Graph, tuple[str, ...]]] = {
    "alone": (Graph(), ("nodes",)),
    "in order": (Graph(in_order=True), ("S4", "nodes", "recompute")),
    "ours, wide layers too": (Graph(seed=1), ("S2", *OURS)),
}


def body(rank: int, world_size: int, expected: dict[str, Results]) -> dict[str, list[str]]:
    mesh = model_mesh(world_size)
    vertices.ROWS_AT_A_TIME = 8
    nothing_is_whole(mesh)
    try:
        return {name: differences(train(CASES[name][0], mesh, CASES[name][1]), e) for name, e in expected.items()}
    finally:
        vertices.ROWS_AT_A_TIME = 65_536


@pytest.fixture(scope="module")
def expected() -> dict[str, Results]:
    # as in `body`: which numbers are drawn depends on how many come at a time
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vertices, "ROWS_AT_A_TIME", 8)
        return {name: train(case) for name, (case, _) in CASES.items()}


@pytest.mark.ranks
def test_three_ranks_train_what_one_device_trains(expected: dict[str, Results], tmp_path: Path) -> None:
    for found in run_ranks(body, 3, tmp_path, expected, timeout=120):
        assert found == {name: [] for name in expected}


class Rows(TorchDispatchMode):
    """How many rows the tensors with D channels have that a step makes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for t in tree_leaves(made):
            if isinstance(t, Tensor) and t.dim() == 2 and t.shape[1] == DIM and t.is_floating_point():
                self.found.add(len(t))
        return made


def nothing_is_whole(mesh: DeviceMesh) -> None:
    """Values, gradients, optimiser state, and what a step makes."""
    model = make(Graph(), edges_per_step=2, negatives_per_edge=1)
    loop = Loop(model, install(model, plan_for(model, OURS, 3), mesh), mesh)
    loop.whole = lambda what: {}  # type: ignore[method-assign]
    with Rows() as rows:
        model.training_step(batch(0), 0)
    own = len(model.graph_encoder.vertices.own_ids)
    assert own in rows.found
    assert not {N, V} & rows.found
    shard = model.graph_encoder.embedding
    (state,) = [o.state[shard] for o in model.optimizers() if shard in o.state]
    assert {t.shape for t in (shard, shard.grad, state["square_avg"])} == {(own, DIM)}
    assert loop.installed.sharded[0].whole.shape == (V, DIM)


def test_what_is_sent_is_counted() -> None:
    mesh = fake_mesh(rank=1, ranks=3)
    model = make(Graph())
    install(model, plan_for(model, ("nodes",), 3), mesh)
    encoder, number = model.graph_encoder, 8
    with CountCollectives() as forward:
        v = encoder.sample(*encoder())
        loss = encoder.kl(v.loc, v.std) + model.edge_nll(v.sample) + encoder.rows["rna"](v.sample).sum()
        loss = loss + encoder.rows["hic"](v.sample).sum()
    with CountCollectives() as backward:
        loss.backward()
    ghosts, ends = encoder.vertices, 6 * (2 + 3)
    assert forward.counts == {"all_to_all_single": 1, "all_reduce": 3}
    assert forward.sent == {
        "all_to_all_single": sum(ghosts.n_sent) * DIM * number,
        "all_reduce": (1 + ends * DIM + G * DIM) * number,
    }
    assert backward.counts == {"all_to_all_single": 1}
    assert backward.sent == {"all_to_all_single": sum(ghosts.n_received) * DIM * number}
    assert f"vertices={len(ghosts.own_ids)} of {V}" in repr(encoder)


def test_undone_is_as_before() -> None:
    model = make(Graph())
    before, state = dict(model.named_modules()), copy.deepcopy(model.state_dict())
    installed = install(model, plan_for(model, OURS, 2), fake_mesh(rank=0, ranks=2))
    assert list(model.state_dict()) == list(state)
    installed.undo()
    assert dict(model.named_modules()) == before
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def graph_profile(anchors: int, genes: int, strata: int) -> Profile:
    modalities = (hic(anchors=anchors, strata=strata), replace(rna(), features=genes))
    graph = GraphProfile(file="g", vertices=anchors + genes, edges=3 * (anchors + genes))
    return replace(profile(*modalities), graph=graph)


@pytest.mark.long
def test_a_ranks_peak_is_its_part_and_as_predicted() -> None:
    """The first layers are split too, by S2, for they are not of the vertices."""
    data, peaks = graph_profile(40_000, 40, 2), []
    shape = reference_shape(data, batch_size=2, latent_dim=64)
    for ranks, strategies in ((1, OURS[:3] + OURS[4:]), (2, ("S2", *OURS))):
        made = plan(data, devices=ranks, strategies=["S1", *strategies], batch_size=2, shape=shape)
        make_subject = partial(reference_subject, data, batch_size=2, latent_dim=64, window=None)
        peaks.append(simulate(make_subject, made, rank=0).peak_bytes)
    assert peaks[1] <= 0.55 * peaks[0]
    for strategies in (("nodes",), OURS):
        made = plan(data, devices=2, strategies=["S1", *strategies], batch_size=2, shape=shape)
        found = simulate(make_subject, made, rank=1).peak_bytes
        assert abs(made.predicted_peak_bytes - found) <= 0.05 * found, strategies


SPEC = VertexParallel(modality="hic", window=WINDOW)


def hooked(encoder: nn.Module) -> None:
    encoder.embedding.register_hook(lambda grad: grad)


class Doubled(vertices.AllVertices):
    def rows(self, v: Tensor, *ids: Tensor) -> tuple[Tensor, ...]:
        return tuple(2 * v[i] for i in ids)


@pytest.mark.parametrize(("change", "text"), [
    (hooked, "has embedding.backward_hooks, which would see a part"),
    (lambda e: e.register_forward_hook(lambda *_: None), "has forward_hooks, which"),
    (lambda e: setattr(e, "loc", nn.Sequential(e.loc)), "has loc='Sequential', and not nn.Linear"),
    (lambda e: setattr(e, "vertices", Doubled()), "that returns rows"),
    (lambda e: e.rows.pop("hic"), r"has the modalities \['rna'\], not 'hic'"),
    (lambda e: delattr(e, "vertices"), "is not supported"),
])  # fmt: skip
def test_refuses_encoders_that_would_not_see_all(change: Callable[[Any], object], text: str) -> None:
    encoder = make(Graph()).graph_encoder
    change(encoder)
    with pytest.raises(InstallError, match=text):
        share_vertices(encoder, SPEC, fake_mesh(rank=0, ranks=2))


def test_refuses_what_cannot_be_dealt() -> None:
    with pytest.raises(InstallError, match="nodes requires several devices, found no mesh"):
        change_of(make(Graph()).graph_encoder, SPEC, None, strategy="nodes")
    model, mesh = make(Graph()), fake_mesh(rank=0, ranks=2)
    install(model, plan_for(model, ("nodes",), 2), mesh)
    with pytest.raises(InstallError, match="has its vertices shared already"):
        share_vertices(model.graph_encoder, SPEC, mesh)
    v = torch.ones(N, DIM, dtype=torch.float64)
    cells = {name: batch(0)["hic"][name] for name in ("batch", "library")}
    u = torch.ones(CELLS, DIM, dtype=torch.float64)
    with pytest.raises(InstallError, match=f"the decoder got {N} rows of v, and this rank has 10 of {N} anchors"):
        model.decoders["hic"].predicted(u, v, **cells)
    rows = shard_anchors(4, 2, mesh["model"])
    with pytest.raises(InstallError, match="1 vertices belong to several of 4 anchors"):
        shard_vertices(5, rows, torch.tensor([0, 1, 1, 3]), (torch.tensor([0]), torch.tensor([1])))
