"""A tiny reference model whose anchors and genes are mixed among the graph's vertices, trained with and without nodes.

Legend: N anchors, G genes; vertices are numbered at random, one of them is no feature, and a gene has no edge.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.costs.rule import Rule
from lightning_amp.installing.describe_module import describe
from lightning_amp.installing.install import Installed, install
from lightning_amp.models.glue import GLUE
from lightning_amp.models.inputs import GraphInputs, ModalityInputs, ModelInputs, StrataInputs
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.techniques.hic.rows import FeatureParallel
from lightning_amp.techniques.ranks.sharded_region import check_region
from lightning_amp.techniques.table import targets_of
from tests.techniques.sharded_cases import Results, plan_of

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
    """Cells of both modalities."""
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
