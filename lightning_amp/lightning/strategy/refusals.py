"""Raise a PlanError before the first step for a plan that does not fit, or for features that it would train wrongly.

    sharded parameters    loss scaling, where a rank would skip steps by overflows in its own shard; averaged models
    replaced modules      callbacks that have chosen layers already, such as pruning, or that copy replaced buffers
    compiled modules      replacing modules inside what torch.compile has wrapped
    pipeline stages       code that requires all parameters or gradients: a rank has those of its stages only

Optimisers are checked in checkpoints/shards.py.
Known limit: callbacks are detected by the names of their classes and base classes.
"""

from collections.abc import Iterable, Iterator, Sequence

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import Precision
from torch import nn
from torch.optim import LBFGS

from lightning_amp._torch import is_compiled
from lightning_amp.costs.profiled_step import ProfiledStep
from lightning_amp.costs.rule import Rule
from lightning_amp.errors import AmpError, DoesNotFitError, PlanError
from lightning_amp.installing.install import Installed, matched_names
from lightning_amp.lightning._compat import rank_zero_info, rank_zero_warn
from lightning_amp.lightning.strategy.request import Request
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.reports.plan_report import plan_report, plan_summary, shortfall
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.data.row import BalanceCells, DataParallel, ShareBatchStatistics
from lightning_amp.techniques.table import STAGED, STRATEGIES, installer_of, is_of_block, stage_search
from lightning_amp.techniques.technique import function_at

LEAVES_LAYERS = (DataParallel, ShareBatchStatistics, BalanceCells)
COPIES_BUFFERS = ("WeightAveraging",)
AVERAGED = ("StochasticWeightAveraging", "WeightAveraging")
KEEPS_LAYERS = ("ModelPruning",)
ALL = "all parameters"


def announce(plan: Plan, request: Request, *, held: bool, report: str = "") -> None:
    """Show the plan before training starts, on rank 0; if it is predicted not to fit, raise or warn.

    Args:
        held: Whether batches are counted during training against the given budget.
        report: File with the complete report; "" if none is written.

    Raises:
        DoesNotFitError: The plan does not fit, or this is not known and the given budget is not held; on all ranks.
    """
    shown = plan_report(plan) if request.verbose else plan_summary(plan, report=report)
    rank_zero_info(f"\n{shown}\n")
    said, budget = shortfall(plan) if plan.fits is False else "", format_bytes(plan.budget_bytes or 0)
    refused = request.refuses
    if refused and plan.fits is None and plan.uncounted and request.device_memory is not None and not held:
        said = f"a budget of {budget} was named, and whether a step fits is not known: {plan.uncounted}"
    if said and refused:
        raise DoesNotFitError(
            f"{said}. Nothing was {'run' if plan.evaluates else 'trained'}: AMPStrategy(on_predicted_oom='warn'), in"
            f" YAML `on_predicted_oom: warn`, {'runs' if plan.evaluates else 'trains'} anyway"
        )
    if said:
        rank_zero_warn(said)


def check_precision(installed: Installed, precision: Precision, plan: Plan) -> None:
    """Raise a PlanError for loss scaling with shards: an overflow would let only the rank of that shard skip a step."""
    who, what = _sharding(installed, plan)
    if who and getattr(precision, "scaler", None) is not None:
        raise PlanError(
            f"precision={getattr(precision, 'precision', '16-mixed')!r} is not supported: its loss scaling skips steps"
            f" rank by rank, and {who} has sharded {what}; use precision='bf16-mixed' or '32-true', or leave {who} out"
        )


def check_compiled(module: nn.Module, plan: Plan) -> None:
    """Raise a PlanError if the plan changes modules that torch.compile has wrapped, or modules inside them."""
    compiled = [name for name, child in module.named_modules() if is_compiled(child)]
    changing = [
        rule
        for rule in plan.rules
        if not (isinstance(rule.spec, LEAVES_LAYERS) or STRATEGIES[rule.strategy].runs_compiled)
    ]
    for rule in changing if compiled else ():
        # fsdp replaces no module: its hooks also run on a compiled block
        names = matched_names(rule, module) if installer_of(type(rule.spec)) else []
        if "" in compiled or any(f"{found}.".startswith(f"{name}.") for name in compiled for found in names):
            raise PlanError(
                f"torch.compile was applied to {compiled!r} ('' is the whole module), and the plan changes {rule.fqn!r}"
                f" by {rule.strategy}, which compiled code would not follow. Compile only layers outside of the"
                " decoder, or ask for strategies='S1', which changes none"
            )


def check_callbacks(installed: Installed, callbacks: Sequence[object], plan: Plan) -> None:
    """Check that no callback depends on parameters, layers or buffers that the plan shards or replaces.

    Raises:
        PlanError: A callback averages shards or replaced buffers, or prunes a module that the plan changes.
    """
    replaced = [swap.fqn for swap in installed.swaps]
    # replaced modules with equal buffers are harmless to callbacks that copy buffers
    buffers = [swap.fqn for swap in installed.swaps if _buffers(swap.old) != _buffers(swap.new)]
    who, what = _sharding(installed, plan)
    for callback in callbacks:
        why = ""
        if who and is_named(callback, AVERAGED):
            why = f"it averages whole parameters, and {who} has sharded {what}; leave one of the two out"
        elif what == ALL and is_named(callback, KEEPS_LAYERS):
            why = f"it masks whole parameters, and {who} has sharded {what}; leave one of the two out"
        elif buffers and is_named(callback, COPIES_BUFFERS):
            why = (
                f"it copies buffers too, and the plan has replaced some, in {buffers[:3]!r}; leave it out, or what"
                " replaces them (S2, nodes)"
            )
        elif replaced and is_named(callback, KEEPS_LAYERS):
            why = (
                f"it has chosen its layers already, and the plan replaces {replaced[:3]!r}; it would change layers"
                " that are not trained, or not as on one device. Leave it out, or ask for strategies='S1', which"
                " changes none"
            )
        if why:
            raise PlanError(f"{type(callback).__name__} is not supported: {why}")


def check_rescue(plan: Plan, trainer: pl.Trainer, *, n_ranks: int) -> None:
    """Raise a PlanError for a rescue if a batch cannot run again."""
    if reasons := why_not_again(plan, trainer, n_ranks=n_ranks):
        raise PlanError(
            f"rescue=True is not supported: a batch of this run cannot run again: {'; '.join(reasons)}."
            " Leave rescue out, or change this"
        )


def why_not_again(plan: Plan, trainer: pl.Trainer, *, n_ranks: int) -> list[str]:
    """Return why a batch cannot run again, or why ranks would wait for each other; empty if it can."""
    reasons = []
    if not trainer.lightning_module.automatic_optimization:
        reasons.append("the module optimises by hand, and may have changed parameters by then")
    if trainer.accumulate_grad_batches != 1:
        reasons.append("gradients of batches before would be lost, which accumulate_grad_batches adds up")
    if any(isinstance(optimizer, LBFGS) for optimizer in trainer.optimizers):
        reasons.append("LBFGS changes parameters between the passes of one step")
    if plan.mesh.model > 1 or any(STRATEGIES[name].data_axis for name in plan.strategies):
        reasons.append("ranks wait for each other within a pass, by what the plan splits over them")
    if n_ranks > 1 and any(isinstance(rule.spec, ShareBatchStatistics) for rule in plan.rules):
        reasons.append("ranks share batch statistics within a pass; share_batch_statistics=False does not")
    return reasons


def _buffers(module: nn.Module | None) -> list[tuple[str, tuple[int, ...]]]:
    return [] if module is None else [(name, tuple(b.shape)) for name, b in module.named_buffers()]


def is_named(thing: object, names: tuple[str, ...]) -> bool:
    """Whether a class in the MRO has one of these names; not every version of Lightning has these classes."""
    return any(kind.__name__ in names for kind in type(thing).__mro__)


def _sharding(installed: Installed, plan: Plan) -> tuple[str, str]:
    """Return which technique shards parameters, and which parameters; ("", "") if none are sharded."""
    everywhere = next((rule.strategy for rule in plan.rules if STRATEGIES[rule.strategy].data_axis), "")
    if everywhere or not installed.sharded:
        return everywhere, ALL if everywhere else ""
    swapped = {id(swap.new): swap.fqn for swap in installed.swaps}
    names = [f"{swapped.get(id(s.module), type(s.module).__name__)}.{s.name}" for s in installed.sharded]
    return "S2", ", ".join(map(repr, names))


SEE_GRADIENTS = ("configure_gradient_clipping", "on_after_backward", "on_before_optimizer_step", "optimizer_step")
NORMS = ("clip_grad_norm_", "get_total_norm", "grad_norm")


def check_run(request: Request, trainer: pl.Trainer, model: nn.Module, rules: Iterable[Rule] = ()) -> None:
    """Check that the run has no features that a pipeline would train differently from one process.

    Raises:
        PlanError: Options, callbacks, other techniques or a module that stages do not support.
        InstallError: Batch normalisation, or hooks on parameters.
    """
    function_at(stage_search().refuse)(model)
    for what, why in _not_with_stages(request, trainer, rules):
        raise PlanError(f"{STAGED} cannot be used with {what}; {why}, or leave {STAGED!r} out")


def _not_with_stages(request: Request, trainer: pl.Trainer, rules: Iterable[Rule]) -> Iterator[tuple[str, str]]:
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        why = "stages run the backward pass before the loss is scaled: use 'bf16-mixed' or '32-true'"
        yield f"precision={trainer.precision!r}", why
    if request.check_finite:
        yield "check_finite=True", "a stage has the values of the blocks of this stage only"
    if request.save_distributed_checkpoint:
        yield "save_distributed_checkpoint=True", "checkpoints of stages are files by now"
    for callback in getattr(trainer, "callbacks", ()):
        if is_named(callback, (*AVERAGED, *KEEPS_LAYERS)):
            why = "it changes or averages parameters that a rank does not hold: leave it out"
            yield type(callback).__name__, why
    for rule in rules:
        # stages support techniques that change no layers, and techniques of blocks
        if rule.strategy != STAGED and not STRATEGIES[rule.strategy].works_in_any_steps and not is_of_block(rule):
            yield rule.strategy, "it was not tried inside of stages: leave it out"
    for hook in SEE_GRADIENTS:
        code = getattr(getattr(type(trainer.lightning_module), hook), "__code__", None)
        for norm in NORMS:
            # a hook of the user that computes a norm over all gradients
            if code and norm in code.co_names:
                yield (
                    f"{norm!r} in {hook}",
                    "a rank has the gradients of its stage only: take the Trainer's gradient_clip_val, or"
                    " self.trainer.strategy.gradient_norm(), which every rank calls",
                )


def without_stages(seen: ProfiledStep, device: torch.device, request: Request, trainer: pl.Trainer) -> ProfiledStep:
    """Return the step without pipeline candidates if the run's options or device do not support a pipeline."""
    if device.type != "cpu":
        return stage_search().without(seen, f"it runs on the CPU by now, and not on {device.type!r}")
    try:
        check_run(request, trainer, trainer.lightning_module)
    except AmpError as error:
        return stage_search().without(seen, str(error))
    return seen
