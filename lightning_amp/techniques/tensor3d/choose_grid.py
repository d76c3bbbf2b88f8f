"""Choose the grid of `tensor3d` for a step: the fastest that fits, by runs of rank 0 without other ranks.

One forward pass determines the layouts of all pairs (x, y). One dry run per pair measures what a rank computes, sends
and allocates; the costs of grids follow from these runs (grid_seconds.py). The chosen grid is counted in its own run.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from math import prod
from types import MethodType
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

import lightning_amp.techniques.tensor3d.layout_rules  # noqa: F401  (registers the rules)
from lightning_amp._torch import in_transform
from lightning_amp.costs.device_rates import Links
from lightning_amp.errors import AmpError, ModelError
from lightning_amp.footprint.chain.chain_of import CountedStep
from lightning_amp.footprint.live_bytes import tensors_of
from lightning_amp.quantities import format_bytes, format_seconds
from lightning_amp.sharding._torch import AUTOGRAD_AND_AUTOCAST, excluded_keys, force_dispatch_keys, included_keys
from lightning_amp.sharding.registry import shard_error
from lightning_amp.sharding.splits import Sent
from lightning_amp.techniques.tensor3d.grid_seconds import DryRun, GridCost, factorings, grid_cost, ranked
from lightning_amp.techniques.tensor3d.in_step import STRAY
from lightning_amp.techniques.tensor3d.layouts import with_axes_exchanged, written
from lightning_amp.techniques.tensor3d.plan_layouts import LayoutPlanner
from lightning_amp.techniques.tensor3d.row import TensorParallel3D

NO_GRADIENT = "does not require grad"
"""Part of torch's error message for a backward pass without anything to differentiate."""
SHOWN = 5
"""Number of grids listed in notes."""
EVERY_PAIR = 15
"""Up to this many pairs (x, y), as for 16 ranks, pairs with more ranks are run until they are clearly slower; if there
are more pairs, until they are slower at all."""
CLEARLY = 2.0
TRIES = 4
"""Most grids that are counted in their own run; a next one is tried only if the last unexpectedly does not fit."""

Pair = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class CountedRun:
    """A dry run and the step that was counted in it."""

    run: DryRun
    step: CountedStep
    sent: list[Sent]


class LookedAt(ModelError):
    """Raised once layouts are computed, because the rest of the step need not run; caught in this file."""


def choose(
    steps: Any, look: Callable[[Mapping[str, Callable[..., Any]]], None], count: Callable[[], CountedStep], links: Links
) -> tuple[CountedStep, tuple[str, ...]]:
    """Set the grid and the model axis of dry steps; return the step that was counted with it, and notes on the choice.

    Args:
        steps: The dry steps (lightning/profiling/dry_steps.py), with the spec of the request.
        look: Runs the step once with overrides of the module's methods.
        count: Counts the step with the current spec.
        links: Links of the ranks.

    Raises:
        AmpError: No grid supports the step.
    """
    spec = steps.spec
    given = spec.sizes if spec.grid else None
    ranks, budget = steps.run_ranks, steps.budget
    grids = [grid for grid in factorings(ranks) if (grid[:3] == given if given else prod(grid[:3]) > 1 or ranks == 1)]
    pairs = sorted({pair for x, y, *_ in grids for pair in ((x, y), (y, x))}, key=lambda p: (prod(p), p))
    layouts: dict[Pair, str] = layouts_of(pairs, look)

    def counted(sizes: tuple[int, int, int], copies: int, own: str) -> CountedRun:
        steps.spec = on_grid(spec, sizes, own, exchanged=False)
        steps.ranks, steps.run_ranks = steps.spec.model_ranks, prod(sizes) * copies
        step = count()
        of_axes = dict(zip(("x", "y", "z", "data"), (*sizes, copies), strict=True))
        run = DryRun(sizes=of_axes, seconds=step.chain.seconds, messages=steps.messages(), profile=step.profile)
        return CountedRun(run=run, step=step, sent=list(steps.sent))

    # if z and the copies are not given, two of each show what they send
    z, copies = (given[2], ranks // prod(given)) if given else (2, 2)
    runs, costs, refused = dict[Pair, CountedRun](), list[GridCost](), list[AmpError]()
    slower = CLEARLY if len(pairs) <= EVERY_PAIR else 1.0
    # from few ranks of x and y to many, until more ranks make a batch clearly slower
    for size in sorted({prod(pair) for pair in pairs}):
        for pair in (pair for pair in pairs if prod(pair) == size):
            try:
                runs[pair] = counted((*pair, z), copies, layouts[pair])
            except AmpError as error:
                refused.append(error)
        # all grids with this number of ranks of x and y, with either of them as the axis that splits features first
        level = ranked(
            [
                grid_cost(runs[pair].run, z, copies, links, exchanged=exchanged)
                for x, y, z, copies in grids
                for exchanged, pair in ((False, (x, y)), (True, (y, x)))
                if x * y == size and pair in runs
            ],
            budget,
        )
        costs = ranked([*costs, *level], budget)
        fits = costs and (budget is None or costs[0].peak_bytes <= budget)
        if fits and level and min(one.batch_seconds for one in level) > slower * costs[0].batch_seconds:
            break
    if not costs:
        raise refused[0]
    tried = list[tuple[int, GridCost, CountedRun]]()
    # the cost of a grid is estimated from another grid's run, so candidates are counted in their own run
    for cost in costs[:TRIES]:
        found = runs[cost.roles]
        if (found.run.sizes["z"], found.run.sizes["data"]) != (cost.sizes[2], cost.copies):
            found = counted((*cost.roles, cost.sizes[2]), cost.copies, layouts[cost.roles])
        # the profile is of the second step; the first one may need more memory
        tried.append((found.step.profile.larger_peak_bytes, cost, found))
        # grids that are not expected to fit are sorted by memory: the first one needs least
        if budget is None or tried[-1][0] <= budget or cost.peak_bytes > budget:
            break
    fits = budget is None or tried[-1][0] <= budget
    _, cost, found = tried[-1] if fits else min(tried, key=lambda one: one[0])
    steps.spec = on_grid(spec, cost.sizes, layouts[cost.roles], exchanged=cost.exchanged)
    steps.ranks, steps.run_ranks = steps.spec.model_ranks, ranks
    other = {"x": "y", "y": "x"} if cost.exchanged else {}
    steps.sent[:] = [one._replace(axis=other.get(one.axis, one.axis)) for one in found.sent]
    return found.step, tuple(_notes(cost, costs, budget, n_grids=len(grids)))


def _notes(chosen: GridCost, costs: list[GridCost], budget: int | None, *, n_grids: int) -> Iterator[str]:
    """Yield the best grids, one per line, and why the chosen one was taken."""
    exchanged = "; its layers split features over y where those of AxoNN do over x" if chosen.exchanged else ""
    if n_grids == 1:
        if exchanged:
            yield f"tensor_grid={chosen.sizes}{exchanged}"
        return
    counted = {cost.sizes for cost in costs}
    fitting = {cost.sizes for cost in costs if budget is None or cost.peak_bytes <= budget}
    within = "" if budget is None else f", {len(fitting)} fit in {format_bytes(budget)}"
    why = "takes least time for a batch" if fitting else "needs least memory"
    yield f"{len(counted)} grids compared{within}: {chosen.sizes} {why}{exchanged}"
    if len(counted) < n_grids:
        most = max(x * y for x, y, _ in counted)
        yield f"{n_grids - len(counted)} grids with x * y > {most} were not compared: {most} take longer than fewer"
    shown, known = 0, set[object]()
    for cost in [chosen, *costs]:
        # grids that differ only by exchanging two axes of one node cost the same, and are listed once
        same = {cost.sizes, (cost.roles, cost.sizes[2], cost.seconds)}
        if not same & known and shown < SHOWN:
            shown += 1
            yield (
                f"tensor_grid={cost.sizes}: {format_bytes(cost.peak_bytes)}, sends"
                f" {format_bytes(cost.sent_bytes)}, {format_seconds(cost.batch_seconds)} a batch"
            )
        known |= same


def layouts_of(pairs: Sequence[Pair], look: Callable[[Mapping[str, Callable[..., Any]]], None]) -> dict[Pair, str]:
    """Compute layouts for numbers of ranks of x and y, by one forward pass of a copy of the step.

    `look` runs the step once with overrides of the module's methods.
    """
    found = dict[Pair, str]()

    def training_step(module: LightningModule, *args: Any, **kwargs: Any) -> Any:
        step = MethodType(type(module).training_step, module)
        planners = {(x, y): LayoutPlanner(list(module.named_parameters()), {"x": x, "y": y}) for x, y in pairs}
        # the backward pass of a step with manual optimisation is skipped
        vars(module)["manual_backward"] = lambda *args, **kwargs: None
        try:
            with ExitStack() as stack:
                stack.enter_context(_Unhooked())
                for planner in planners.values():
                    stack.enter_context(planner)
                stack.enter_context(force_dispatch_keys(included_keys(), excluded_keys() | AUTOGRAD_AND_AUTOCAST))
                step(*args, **kwargs)
        except RuntimeError as error:
            if NO_GRADIENT not in str(error):
                raise
            raise ModelError(STRAY) from error
        finally:
            del vars(module)["manual_backward"]
        found.update({pair: written(planner) for pair, planner in planners.items()})
        raise LookedAt

    with suppress(LookedAt):
        look({"training_step": training_step})
    return found


class _Unhooked(TorchFunctionMode):
    """Ignore registrations of hooks on tensors, because nothing is differentiated in this pass."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.register_hook, Tensor.retain_grad):
            return RemovableHandle(OrderedDict())
        if in_transform() and any(isinstance(t, nn.Parameter) for t in tensors_of((args, kwargs))):
            raise shard_error(func, [args], "it is called inside a transform of torch.func, such as vmap")
        return func(*args, **(kwargs or {}))


def on_grid(spec: TensorParallel3D, sizes: tuple[int, int, int], layouts: str, *, exchanged: bool) -> TensorParallel3D:
    """Return the spec for a grid, with layouts for (x, y), or for (y, x) if they are exchanged."""
    return replace(spec, grid="x".join(map(str, sizes)), layouts=with_axes_exchanged(layouts) if exchanged else layouts)
