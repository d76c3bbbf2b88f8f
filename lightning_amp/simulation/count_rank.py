"""Count the step of one rank with a plan installed: its peak by kind, where it is, and what the rank sends.

The second step of the training loop is counted (footprint/profile_module.py), with the rank's shards and the reduction
of gradients, on a mesh without other ranks. Nothing ends the step where a budget is exceeded: that is found afterwards,
in the record of all storages.

Known limit: the few numbers with which the ranks of a fit check in every step that they agree on their batches are not
counted.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule

from lightning_amp.errors import PlanError
from lightning_amp.footprint.equal_parts import leaving_out_equal
from lightning_amp.footprint.module_profile import BACKWARD, FORWARD, KINDS, OPTIMISER, REDUCTION, Life, bytes_over_time
from lightning_amp.footprint.profile_module import counted_step
from lightning_amp.footprint.run.run_settings import RunSettings
from lightning_amp.footprint.step_recorder import StepRecorder
from lightning_amp.holding import holding, replacing
from lightning_amp.installing.install import Installed, install
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.sharding.splits import SENT, DryMesh, Sent
from lightning_amp.simulation.models_without_values import Subject
from lightning_amp.techniques.contract.protocol import find_decoders
from lightning_amp.techniques.data.batch_norm import share_batch_statistics
from lightning_amp.techniques.data.gradient_sync import GradientSync
from lightning_amp.techniques.data.row import ShareBatchStatistics
from lightning_amp.techniques.hic.scores import nonzero_counts
from lightning_amp.techniques.table import STAGED, STRATEGIES, beyond_decoder

BEFORE, OUTSIDE, OTHERS = "the weights, optimiser state and batch", "the encoders and the graph", "the other decoders"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankResult:
    """Memory and communication of one rank's step.

    Attributes:
        peak_bytes: Peak; if the budget was exceeded, including the request that exceeded it.
        breakdown: The peak by kind.
        bytes_of_strata: Bytes alive after each of the rank's strata, up to where the budget was exceeded.
        comm_bytes: Bytes given to collectives in a step, by kind.
        failed_at: What was running when the budget was exceeded, None if it was not.
    """

    rank: int
    peak_bytes: int
    breakdown: dict[str, int]
    bytes_of_strata: dict[int, int]
    comm_bytes: dict[str, int]
    failed_at: str | None = None
    requested_bytes: int | None = None

    @property
    def strata_bytes(self) -> tuple[int, ...]:
        """Values of `bytes_of_strata`, in the order of the strata."""
        return tuple(self.bytes_of_strata.values())


def refuse_unsimulated(plan: Plan) -> None:
    """Raise a PlanError for a plan with a technique that is not simulated."""
    needing = [
        name for name in plan.strategies if STRATEGIES[name].data_axis or STRATEGIES[name].steps or name == STAGED
    ]
    if needing:
        raise PlanError(
            f"simulate does not support {', '.join(needing)}: it counts the step of one rank by itself, which sends and"
            " receives parameters or activations there. `lightning-amp plan` predicts the peak of a rank; or name other"
            " --strategies"
        )


def count_rank(subject: Subject, plan: Plan, rank: int, *, device_type: str) -> RankResult:
    """Count the second training step of a rank; the module is unchanged.

    Raises:
        InstallError: The plan does not fit the module.
        PlanError: As `refuse_unsimulated`.
        ModelError: The step raises an error.
    """
    refuse_unsimulated(plan)
    mesh, module, sent = _mesh(plan, rank), subject.module, list[Sent]()
    with ExitStack() as undo:
        undo.enter_context(replacing(nonzero_counts.ASSUMED, share=subject.share, in_counts=True))
        installed = _install(module, plan, mesh, undo)
        shards = {id(part.shard) for part in installed.sharded}
        reducer = partial(
            _reducer,
            mesh=mesh,
            parts=installed.partial_names(module),
            shards=[name for name, parameter in module.named_parameters() if id(parameter) in shards],
            rounds_differently=device_type == "cuda",
        )
        run_settings = RunSettings(values=False, frees_gradients=True, reducer=reducer)
        # techniques of any module may have counted the step's operators, as the segments of `replay`
        briefly = nullcontext() if beyond_decoder(plan.strategies) else leaving_out_equal()
        with holding(SENT, sent), briefly:
            found, _ = counted_step(module, subject.batch, None, _RankRecorder, run_settings)
    by_kind = Counter[str]()
    for one in sent:
        by_kind[one.kind] += one.n_bytes
    return _result(found, rank, by_kind, decoder=_largest_decoder(module), budget=plan.budget_bytes)


class _RankRecorder(StepRecorder):  # type: ignore[no-untyped-call]
    """Recorder of a step that forgets what an earlier step has sent."""

    def start(self, batch: Any, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Start recording."""
        sent = SENT.get()
        assert sent is not None, "what a rank sends is counted"
        sent.clear()
        super().start(batch, optimizers)


def _mesh(plan: Plan, rank: int) -> DryMesh:
    return DryMesh(plan.mesh.data, plan.mesh.model, rank)


def _install(module: LightningModule, plan: Plan, mesh: DryMesh, undo: ExitStack) -> Installed:
    installed = install(module, plan, mesh)
    undo.callback(installed.undo)
    if any(isinstance(rule.spec, ShareBatchStatistics) for rule in plan.rules):
        undo.callback(share_batch_statistics(module, mesh["data"]))
    return installed


def _reducer(
    module: LightningModule, *, mesh: DryMesh, parts: list[str], shards: list[str], rounds_differently: bool
) -> Callable[[], None]:
    named = module.get_parameter
    gradients = GradientSync(
        module.parameters(),
        mesh,
        partial=map(named, parts),
        sharded=map(named, shards),
        rounds_differently=rounds_differently,
    )
    gradients.watch()
    return gradients.reduce


def _largest_decoder(module: LightningModule) -> str | None:
    found = find_decoders(module)
    return max(found, key=lambda name: found[name].n_anchors * len(found[name].strata), default=None)


def _result(
    found: StepRecorder, rank: int, sent: dict[str, int], *, decoder: str | None, budget: int | None
) -> RankResult:
    by_kind = bytes_over_time(found.lives, found.work)
    total = by_kind.sum(0)
    exceeds = budget is not None and int(total.max()) > budget
    at = int(np.argmax(total > budget if exceeds else total))
    strata = Strata(decoder)
    after: dict[int, int] = {}
    for passed in found.passed:
        if strata.is_stratum(passed.fqn) and not (exceeds and passed.operator >= at):
            after.setdefault(strata.of(passed.fqn), passed.n_bytes)
    return RankResult(
        rank=rank,
        peak_bytes=int(total[at]),
        breakdown={kind: int(n) for kind, n in zip(KINDS, by_kind[:, at], strict=True)},
        bytes_of_strata=dict(sorted(after.items())),
        comm_bytes=dict(sent),
        failed_at=strata.place(found.lives, found.work, at) if exceeds else None,
        requested_bytes=sum(life.n_bytes for life in found.lives if life.birth == at) if exceeds else None,
    )


class Strata:
    """The strata of a decoder by the names of their modules.

    Args:
        decoder: Name of the decoder; None if there is none.
    """

    def __init__(self, decoder: str | None) -> None:
        self._prefix = None if decoder is None else f"{decoder}.strata." if decoder else "strata."

    def of(self, fqn: str) -> int:
        """Return the number of the stratum that is a module, or holds it; -1 for other modules."""
        if self._prefix is None or not fqn.startswith(self._prefix):
            return -1
        return int(fqn.removeprefix(self._prefix).partition(".")[0])

    def is_stratum(self, fqn: str) -> bool:
        """Whether a module is a stratum."""
        return self.of(fqn) >= 0 and fqn == f"{self._prefix}{self.of(fqn)}"

    def place(self, lives: list[Life], work: list[tuple[str, str]], at: int) -> str:
        """Return what is running at an operator, worded as in "out of memory at ..."."""
        phase, k = work[at][0], self.of(work[at][1])
        if at == 0:
            return BEFORE
        if phase in (REDUCTION, OPTIMISER):
            return {REDUCTION: "the reduction of gradients", OPTIMISER: "the optimiser step"}[phase]
        if phase == FORWARD:
            ran = any(p == FORWARD and self.of(name) >= 0 for p, name in work[:at])
            return f"stratum {k}" if k >= 0 else OTHERS if ran else OUTSIDE
        assert phase == BACKWARD, "it is the last phase"
        # the position in the forward pass of what a backward operator belongs to
        orders = (life.order for life in lives if life.order >= 0 and self.of(life.fqn) >= 0)
        first = min(orders, default=None)
        here = next((life.order for life in reversed(lives) if life.birth <= at and life.order >= 0), -1)
        place = OUTSIDE if first is None or here < first else OTHERS
        return f"the backward pass of {f'stratum {k}' if k >= 0 else place}"
