"""Record losses, gradients and weights of a run, compare ranks with one process, and list suspects for differences.

    error(x) = ||x - x_one|| / max(||x_one||, FLOOR ||all of its kind||)        x_one: value of the single process

Rounding is amplified if a step divides by nearly zero: an adaptive optimiser takes a full step for a gradient that is
zero except for rounding, such as that of a bias before batch normalisation. In double precision, such errors stay below
the tolerance after an update, so double precision decides if both precisions are compared.

Suspects follow from what the runs have recorded; they are not proved.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from lightning_amp._torch import unseen
from lightning_amp.lightning.checkpoints.shards import Shards
from lightning_amp.lightning.consistency.same_parameters import SHARE_STATISTIC, common_buffers, differing
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.random_streams import drawn_between, random_streams
from lightning_amp.verification.result import Row, Suspect


@dataclass(kw_only=True, slots=True)
class Record:
    """Recorded values of a run of a few steps."""

    # per step, the loss of every backward pass, as the rank weighs it
    losses: list[list[float]] = field(default_factory=list)
    # full gradients of the first step, when its optimisers use them
    gradients: dict[str, Tensor] = field(default_factory=dict)
    # with buffers: the module's full state after the last step
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    differing_buffers: list[str] = field(
        default_factory=list
    )  # buffers that differ between the ranks after the last step
    # dropout modules, and generators, if a training step has drawn random numbers
    draws: list[str] = field(default_factory=list)


class Recorder(Callback):
    """Record a run of a few steps in `record`."""

    def __init__(self) -> None:
        self.record = Record()
        self._stepped: set[int] = set()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wrap the module's step, after all techniques were installed."""
        step = pl_module.training_step

        @wraps(step)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            before = random_streams()
            output = step(*args, **kwargs)
            drawn = [f"training_step, {name}" for name in drawn_between(before, random_streams())]
            named = ((n, part) for n, part in pl_module.named_modules() if "torch." in str(drawn))
            # dropout layers of torch have their probability in one of these attributes
            chance = ("p", "dropout", "drop_prob")
            drops = [
                f"{n} ({type(part).__name__})"
                for n, part in named
                if part.training and any(isinstance(p := getattr(part, c, 0), float) and p > 0 for c in chance)
            ]
            self.record.draws = list(dict.fromkeys([*self.record.draws, *drops, *drawn]))
            return output

        # on the instance, because the class belongs to the user; removed at the end
        pl_module.training_step = training_step  # type: ignore[method-assign]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Seed the generators: planning and installing may have drawn random numbers, unlike the single process."""
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin a step."""
        self.record.losses.append([])

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Record the loss."""
        step = trainer.strategy._step if isinstance(trainer.strategy, AMPStrategy) else None
        self.record.losses[-1].append(float(loss.detach() if step is None else step.share_to_read(loss)))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Record the gradients of the first step, after averaging over ranks and before clipping."""
        if len(self.record.losses) > 1 or id(optimizer) in self._stepped:
            return
        # each optimiser once: manual optimisation may step an optimiser several times
        self._stepped.add(id(optimizer))
        shards = trainer.strategy._shards if isinstance(trainer.strategy, AMPStrategy) else Shards()
        whole = partial(shards.full_gradients, pl_module, optimizer)
        # they are kept for the comparison, and are no part of the step, which may have a budget
        with unseen():
            # in manual optimisation, fsdp's root module has gathered parameters during the step
            gradients = whole() if shards.units is None else shards.units.on_rows(whole)
        self.record.gradients = gradients | self.record.gradients

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the final state; gathered here, because parameters are still sharded."""
        shards = trainer.strategy._shards if isinstance(trainer.strategy, AMPStrategy) else Shards()
        state = shards.saved_state(pl_module.state_dict(), "whole")
        names = {name for name, _ in pl_module.named_parameters(remove_duplicate=False)}
        kept = {name: value.detach().clone() for name, value in state.items() if isinstance(value, Tensor)}
        self.record.parameters = {name: value for name, value in kept.items() if name in names}
        self.record.buffers = {name: value for name, value in kept.items() if name not in names}
        if isinstance(trainer.strategy, AMPStrategy):
            buffers = differing(common_buffers(pl_module), trainer.strategy.mesh)
            self.record.differing_buffers = [name for name, _, _ in buffers]

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the module's step."""
        vars(pl_module).pop("training_step", None)


Precision = Literal["float32", "float64"]
DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "float64": torch.float64}
FIRST, AFTER = ("first loss", "gradients"), ("later losses", "parameters", "buffers")
"""Kinds of quantities: of the first step, and after an update."""
ALLOWED: dict[str, dict[str, float]] = {
    "float64": dict.fromkeys(FIRST, 1e-10) | dict.fromkeys(AFTER, 1e-6),
    "float32": dict.fromkeys(FIRST + AFTER, 1e-4) | {"first loss": 1e-5},
}
FLOOR = 0.01
"""Least denominator of a relative error, as a share of the norm of all tensors of the kind."""

SAME = 1e-6
THE_LOSS = "the loss in training_step"
DRAWS = Suspect(
    suspect="random draws",
    why="Random numbers are drawn. Where they are drawn for samples, each rank draws for its part of the batch, so that"
    " a sample gets other numbers than in one process.",
    advice="Training is as random as before, only not the same. For equal runs make the draws a function of the sample:"
    " lightning_amp.models.keyed_noise has KeyedDropout and keyed_normal; or switch them off while you compare.",
)
NORMS = Suspect(
    suspect="batch statistics",
    why="With share_batch_statistics=False BatchNorm normalises by the samples of one rank.",
    advice="Share the statistics: AMPStrategy(share_batch_statistics=True), which is the default.",
)
BUFFERS = Suspect(
    suspect="buffers",
    why="These buffers differ between ranks after training: the module changes them from the samples of its rank, and"
    " what reads them differs too.",
    advice=f"{SHARE_STATISTIC}. Otherwise rank 0's are taken at every validation, and are in checkpoints.",
)
SUM = Suspect(
    suspect="sum over samples",
    where=THE_LOSS,
    why="The gradients of one process are those of the ranks times the number of data ranks: the loss may be a sum over"
    " samples, and ranks average.",
    advice="Take the mean over samples (and a larger learning rate), then verify again.",
)
UNEQUAL = Suspect(
    suspect="unequal parts",
    where=THE_LOSS,
    why="The loss differs. Modalities have different numbers of samples, and ranks unequal"
    " parts of them: a rank's loss is weighted by all of its samples, which is right for one mean over samples only.",
    advice="Give every rank equally many samples of every modality: drop_last=True, or SingleCellDataModule.",
)
MEANS = Suspect(
    suspect="mean of means",
    where=THE_LOSS,
    why="The loss or its gradient differs. It may divide by something that differs between ranks, such as the number of"
    " entries of a mask; or it, or a module, may relate samples of the batch, of which a rank has its part only.",
    advice="Divide by the number of samples, or by a constant; or divide by the mean of the denominator over ranks:"
    " self.trainer.strategy.reduce(denominator.detach(), reduce_op='mean'). Compute what is read of other samples over"
    " those of all ranks (self.all_gather with sync_grads=True), use nn.BatchNorm, which the strategy shares, or split"
    " the model instead, where it has a decomposed decoder: model_parallel_size=devices.",
)
ROUNDING = Suspect(
    suspect="rounding",
    why="Single precision differs, and in double precision both agree: sums in another order round in another way.",
    advice="Nothing is wrong with the ranks; if one process with the samples in another order differs as much, the step"
    " itself loses digits.",
)
ROUNDING_TOO = Suspect(
    suspect="rounding",
    why="Single precision alone was compared, in which sums in another order round in another way.",
    advice="Compare in double precision too.",
)
NOT_FINITE = Suspect(
    suspect="not finite",
    why="A number that is not finite cannot be compared.",
    advice="Let one process train first: Trainer(detect_anomaly=True) says where it begins.",
)
UNKNOWN = Suspect(
    suspect="unknown",
    why="No random draw, no statistic or buffer of one rank, no loss that averages in another way was seen.",
    advice="Look for what depends on the rank (global_rank, files), in training_step, the optimisers and the hooks, or"
    " on the order of samples; where nothing is found, this may be a fault of lightning_amp: please report it with this"
    " table.",
)

Errors = dict[str, dict[str, float]]
"""Kind of quantity -> relative error of every tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Comparison of one rank with the single process, in one precision."""

    precision: Precision
    place: tuple[int, int]  # data rank and number of data ranks
    # per step: weighted losses of this rank, and losses of the single process
    losses: list[list[float]]
    one_losses: list[list[float]]
    all_cells: int  # cells of the first global batch; 0 if not known
    errors: Errors
    # the common factor of all gradients, single process / rank; None if there is none
    factor: float | None
    draws: list[str]  # where the single process drew random numbers
    differing_buffers: list[str]  # buffers that differ between the ranks
    unshared: list[str]  # BatchNorm layers that normalise by one rank's cells
    uneven: bool  # whether modalities differ in numbers of cells, and the data ranks do not divide them
    strategies: tuple[str, ...]
    mesh: tuple[int, int]


def rows_of(reports: Sequence[Report]) -> tuple[Row, ...]:
    """Compare every recorded quantity, in the order of a step.

    loss of a step = mean over data ranks of the losses that they weigh by samples, or by labels
    """
    first = reports[0]
    precision, steps = first.precision, len(first.one_losses)
    after = f"after {steps} step{'s' if steps > 1 else ''}"
    # ranks of a model group have the same loss: only one of each data rank counts
    ranks = {report.place[0]: report for report in reversed(reports)}.values()

    def of_all(step: int, backward: int) -> float:
        if any(len(report.losses[step]) <= backward for report in ranks):
            return float("nan")
        return sum(report.losses[step][backward] for report in ranks) / len(ranks)

    union = [[of_all(step, i) for i, _ in enumerate(losses)] for step, losses in enumerate(first.one_losses)]
    losses: tuple[dict[str, float], ...] = {}, {}
    for name, error in loss_errors(union, first.one_losses).items():
        # the loss of the first step precedes any update, and has a smaller tolerance
        losses[name.split(",")[0] != "step 1"][name] = error
    # keep the largest error of every tensor over the ranks; nan counts as the largest
    worst: Errors = {kind: {} for kind in first.errors}
    for report in reports:
        for kind, found in report.errors.items():
            for name, error in found.items():
                known = worst[kind].get(name, -1.0)
                if known == known and not error <= known:
                    worst[kind][name] = error
    quantities = (
        ("loss, step 1", "first loss", losses[0]),
        ("gradients, step 1", "gradients", worst["gradients"]),
        ("loss, later steps", "later losses", losses[1]),
        (f"parameters {after}", "parameters", worst["parameters"]),
        (f"buffers {after}", "buffers", worst["buffers"]),
    )
    rows = []
    for quantity, kind, found in quantities:
        rows += [Row(quantity, precision, found, ALLOWED[precision][kind])] if found else []
    return tuple(rows)


def errors(found: Mapping[str, Tensor], one: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the relative error of every tensor of either side; inf if one side lacks it or its shape differs."""
    norms = {name: _norm(value) for name, value in one.items()}
    floor = FLOOR * sum(norm**2 for norm in norms.values() if norm == norm) ** 0.5
    result = {}
    for name in [*one, *sorted(found.keys() - one.keys())]:
        if name not in one or name not in found or found[name].shape != one[name].shape:
            result[name] = float("inf")
            continue
        mine, its = (value.to(_wide(one[name])) for value in (found[name], one[name]))
        # equal infinities, as of a mask, have no difference
        difference = float(torch.where(mine == its, 0, mine - its).norm())
        # no division if the values are equal: they may be all zero
        result[name] = difference and difference / max(norms[name], floor, torch.finfo().tiny)
    return result


def _wide(value: Tensor) -> torch.dtype:
    return torch.complex128 if value.is_complex() else torch.float64


def _flat(value: Tensor) -> Tensor:
    return (torch.view_as_real(value) if value.is_complex() else value).double().flatten()


def _norm(value: Tensor) -> float:
    """Norm of the finite elements."""
    wide = value.to(_wide(value))
    return float(torch.where(wide.isfinite(), wide, 0).norm())


def loss_errors(found: list[list[float]], one: list[list[float]]) -> dict[str, float]:
    """Return the relative error of every loss; nan if `found` lacks it."""
    result = {}
    for step, losses in enumerate(one):
        for i, loss in enumerate(losses):
            mine = found[step][i] if step < len(found) and i < len(found[step]) else float("nan")
            name = f"step {step + 1}" + (f", backward {i + 1}" if len(losses) > 1 else "")
            result[name] = abs(mine - loss) / max(abs(loss), torch.finfo().tiny)
    return result


def common_factor(found: Mapping[str, Tensor], one: Mapping[str, Tensor]) -> float | None:
    """Return the factor by which all tensors of `one` differ from those of `found`; None if there is no common one."""
    pairs = [(_flat(found[k]), _flat(one[k])) for k in one if k in found]
    pairs = [(a, b) for a, b in pairs if a.shape == b.shape]
    # least-squares factor, which is accepted if the two vectors are parallel (cosine 1)
    mixed, own, ones = (sum(float(p[i] @ p[j]) for p in pairs) for i, j in ((0, 1), (0, 0), (1, 1)))
    return mixed / own if own and ones and abs(1 - mixed * mixed / (own * ones)) < 1e-6 else None


def find_suspects(rows: Sequence[Row], reports: Sequence[Report]) -> tuple[Suspect, ...]:
    """Return suspects for rows with errors; `reports` has all ranks in all precisions."""
    wrong = [row for row in rows if row.wrong]
    if not wrong:
        return ()
    for row in wrong:
        # nan
        if row.error != row.error:
            return (NOT_FINITE.at([f"{row.quantity}, {row.precision}"]),)
    exact = [row for row in wrong if row.precision == "float64"]
    if exact:
        return tuple(_seen(exact, reports)) or (UNKNOWN,)
    if any(report.precision == "float64" for report in reports):
        return (ROUNDING.at([f"{wrong[0].quantity}, {wrong[0].worst}"]),)
    return (*_seen(wrong, reports), ROUNDING_TOO)


def _seen(wrong: Sequence[Row], reports: Sequence[Report]) -> Iterator[Suspect]:
    first = next(report for report in reports if report.precision == wrong[0].precision)
    ranks, kinds = first.place[1], [row.quantity for row in wrong]
    buffers = all(quantity.startswith("buffers") for quantity in kinds)
    draws = [] if buffers else first.draws
    drops = any(not place.startswith("training_step") for place in draws)
    if drops:
        yield DRAWS.at(draws)
    if first.unshared:
        yield NORMS.at(first.unshared)
    differing_buffers = first.differing_buffers or (wrong[0].wrong if buffers else [])
    if differing_buffers:
        yield BUFFERS.at(differing_buffers)
    # each of these explains a difference; the loss is suspected only without them
    if drops or first.unshared or differing_buffers:
        return
    # draws of the training step that are not per cell are equal on all ranks, so they are a weaker explanation
    if draws:
        yield DRAWS.at(draws)
    if ranks == 1 or not any(quantity.startswith(("loss", "gradients")) for quantity in kinds):
        return
    if first.factor is not None and abs(first.factor / ranks - 1) < SAME:
        yield SUM
    else:
        yield UNEQUAL if first.uneven else MEANS
