"""Run a technique's steps as rank 0 of a model axis without other ranks, to count what that rank holds and sends."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import wraps
from importlib import import_module
from types import MethodType
from typing import Any

from lightning.pytorch import LightningModule

from lightning_amp.costs.link_seconds import Kind, Links
from lightning_amp.costs.rule import Spec
from lightning_amp.dist.splits import MeshAxis, Sent
from lightning_amp.errors import AmpError, PlanError, ShardError
from lightning_amp.footprint.chain.chain_of import CountedStep
from lightning_amp.lightning.profiling.choose_grid import choose_grid
from lightning_amp.planning.plan.plan import Explanation, Plan
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.put_methods import put_methods
from lightning_amp.techniques.table import STRATEGIES, targets_of, with_steps
from lightning_amp.techniques.tensor3d.grid_seconds import Message, sent_seconds

MOST_SHOWN = 2
"""Operators that send most, by name."""
MOST_MOVED = 0.1
"""Of the bytes of a forward pass, from which on operators are named that compute on tensors moved for them."""

_PRICED_AS: dict[str, Kind] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "ring": "exchange",
}


class DrySteps:
    """A technique whose steps take the place of a module's while it is counted.

    Attributes:
        name: Of the technique.
        spec: Of its rule.
        ranks: Of the model axis.
        run_ranks: Of the run.
        budget: Bytes of one device; None where they are not known.
        chosen: Whether the spec says how it is done; else `choose` finds it.
        sent: Collectives that rank 0 would have issued for the last batch.
        axis: The model axis of a dry run, in which nothing is sent.
        notes: Notes on the choice.

    Args:
        name, spec, ranks, run_ranks, budget, chosen: As above.
    """

    def __init__(
        self,
        name: str,
        spec: Spec,
        ranks: int,
        *,
        run_ranks: int | None = None,
        budget: int | None = None,
        chosen: bool = True,
    ) -> None:
        self.name, self.spec, self.ranks, self.chosen = name, spec, ranks, chosen
        self.run_ranks, self.budget = ranks if run_ranks is None else run_ranks, budget
        self.sent: list[Sent] = []
        self.notes: tuple[str, ...] = ()
        self._looking: Mapping[str, Callable[..., Any]] = {}
        self.axis = MeshAxis("model", ranks, 0, None, sent=self.sent)

    @classmethod
    def asked(
        cls,
        strategies: Iterable[str],
        options: Any,
        ranks: int,
        *,
        run_ranks: int | None = None,
        budget: int | None = None,
    ) -> "DrySteps | None":
        """Of the strategy that has steps, with the options that a person has given; None where there is none.

        Args:
            strategies, options: As of a request.
            ranks, run_ranks, budget: As of the attributes.

        Raises:
            PlanError: An option outside what is allowed.
        """
        name = with_steps(strategies)
        if not name or (asked := STRATEGIES[name].options) is None:
            return None
        ((_, spec),) = targets_of(name, None)  # type: ignore[arg-type]
        spec, chosen = asked(spec, options)
        return cls(name, spec, ranks, run_ranks=run_ranks, budget=budget, chosen=chosen)

    def check_ranks(self) -> None:
        """Refuse, with a PlanError, a grid that does not divide the ranks of the run."""
        needed = getattr(self.spec, "ranks", 1)
        if self.run_ranks % needed:
            raise PlanError(
                f"a grid of {needed} ranks was given for {self.run_ranks} ranks, which are no multiple of it; change"
                " the grid, or the number of ranks (`devices` of the Trainer)"
            )

    def put(self, module: LightningModule) -> Callable[[], None]:
        """Put the steps in the place of a module's; returns what undoes it."""
        if self._looking:
            technique = import_module(STRATEGIES[self.name].steps)
            if hasattr(technique, "refuse"):
                technique.refuse(module)
            return put_methods(
                module, {name: MethodType(step, module) for name, step in self._looking.items()}
            )
        axis = self.axis
        if STRATEGIES[self.name].data_axis:
            axis = MeshAxis("ranks", self.run_ranks, 0, None, sent=self.sent)
        undo = put_steps(module, self.name, self.spec, axis)
        step = vars(module).get("training_step")
        if step is not None:

            def begun(module: LightningModule, *args: Any, **kwargs: Any) -> Any:
                # a step is run several times, and may fail without values first
                self.sent.clear()
                return step.__func__(module, *args, **kwargs)

            vars(module)["training_step"] = MethodType(wraps(step.__func__)(begun), module)
        return undo

    def choose(self, batch: Any, count: Callable[[], CountedStep], links: Links) -> CountedStep | None:
        """Choose the spec: of a technique with a grid the fastest that fits, of others that of the least peak, of those
        that it has for a batch; returns the step with it, where it was counted last.

        Args:
            batch: The first one.
            count: Counts the step with the spec of the moment.
            links: Between the ranks.

        Raises:
            ShardError: The step can be run with none of them.
        """
        if self.chosen:
            return None

        def look(steps: Mapping[str, Callable[..., Any]]) -> None:
            """Run the step once with other functions in the place of the module's."""
            self._looking = steps
            try:
                count()
            finally:
                self._looking = {}

        technique = import_module(STRATEGIES[self.name].steps)
        if hasattr(technique, "on_grid"):
            step, self.notes = choose_grid(self, technique, look, count, links)
            self.chosen = True
            return step
        options = technique.options(batch, self.spec, self.ranks, look)
        peaks, refused = list[tuple[int, Spec]](), list[str]()
        for spec in options:
            self.spec = spec
            try:
                peaks.append((count().profile.peak_bytes, spec))
            except AmpError as error:
                refused.append(f"{spec}: {error.__cause__ or error}")
        if not peaks:
            raise ShardError(
                f"{self.name} has no dims of the batch along which this step can be split over {self.ranks} ranks:"
                f" {'; '.join(refused) or 'no tensor of the batch has a dim of as many indices'}"
            )
        self.spec, self.chosen = min(peaks, key=lambda pair: pair[0])[1], True
        return None

    def messages(self) -> tuple[Message, ...]:
        """The collectives of the last batch."""
        return tuple(Message(_PRICED_AS[one.kind], one.n_bytes, one.axis) for one in self.sent)

    def sent_seconds(self, links: Links) -> float:
        """What the collectives of the last batch take, none of them hidden behind computation."""
        return sent_seconds(self.messages(), {one.axis: one.ranks for one in self.sent}, links)

    def sent_notes(self) -> Iterator[str]:
        """What rank 0 sends in one batch, and a warning of operators that gather much of it."""
        yield Explanation(self._note())
        forward = [one for one in self.sent if not one.backward]
        moved = Counter[str]()
        for one in forward:
            moved[one.why] += one.n_bytes * one.moves
        if STRATEGIES[self.name].data_axis and moved.total() > MOST_MOVED * sum(s.n_bytes for s in forward):
            named = ", ".join(f"{why} ({format_bytes(n)})" for why, n in moved.most_common(MOST_SHOWN) if n)
            yield (
                f"{format_bytes(moved.total())} of the {format_bytes(sum(s.n_bytes for s in forward))} that a forward"
                f" pass sends are for operators that need features whole, which is exact and slow: {named}"
            )

    def _note(self) -> str:
        if not self.sent:
            return f"{self.name} sends nothing over the model axis but gradients"
        kinds = Counter(one.kind for one in self.sent)
        told = ", ".join(f"{n} {kind}" for kind, n in kinds.most_common())
        by_operator = Counter[str]()
        for one in self.sent:
            by_operator[one.why] += one.n_bytes
        most = ", ".join(
            f"{format_bytes(n)} for {why}" for why, n in by_operator.most_common(MOST_SHOWN) if why
        )
        most = f"; most: {most}" if most else ""
        whole = format_bytes(sum(one.n_bytes for one in self.sent))
        if STRATEGIES[self.name].data_axis:
            return f"over its grid a rank sends {whole} a batch ({told}){most}"
        return f"over the model axis a rank sends {whole} a batch in addition to gradients ({told}){most}"


def put_steps(module: LightningModule, name: str, spec: Spec, mesh: Any) -> Callable[[], None]:
    """Put the steps of a technique in the place of a module's; returns what undoes it.

    Args:
        name, spec: Of the technique.
        mesh: The ranks of the model axis.
    """
    changed: dict[str, Any] = import_module(STRATEGIES[name].steps).install(module, spec, mesh)
    return put_methods(module, changed)


def with_spec(plan: Plan, steps: DrySteps | None, why: str) -> Plan:
    """The plan with what a request, a plan or the first batch says of how the technique is done.

    Args:
        plan: Without it.
        steps: The technique; None without one.
        why: The step could not be counted.

    Raises:
        PlanError: Nobody has said it.
    """
    if steps is None:
        return plan
    # outside of a fit no step is counted, and on a grid that was given parameters are split without layouts too
    row, given = STRATEGIES[steps.name], bool(getattr(steps.spec, "grid", ""))
    if not steps.chosen and (why or not (row.data_axis and given)):
        found = f"which fails: {why}" if why else "and none is counted in this run"
        # a grid alone does not say how layers are split
        hint = "" if why and row.data_axis else f". {row.without_step}"
        raise PlanError(
            f"{steps.name} finds how it splits by a count of the first batch's step, {found}{hint}"
        )
    rules = (replace(rule, spec=steps.spec) if rule.strategy == steps.name else rule for rule in plan.rules)
    return replace(plan, rules=tuple(rules))
