"""Run a distributed technique's steps as rank 0 without other ranks: count memory and messages, complete its spec."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import wraps
from types import MethodType
from typing import Any, cast

from lightning.pytorch import LightningModule

from lightning_amp.costs.device_rates import Kind, Links
from lightning_amp.costs.rule import Spec
from lightning_amp.errors import AmpError, PlanError, ShardError
from lightning_amp.footprint.chain.chain_of import CountedStep
from lightning_amp.installing.install import install_steps
from lightning_amp.planning.plan.plan import Explanation, Plan
from lightning_amp.quantities import format_bytes
from lightning_amp.sharding.splits import MeshAxis, Sent
from lightning_amp.techniques.put_methods import STEPS, put_methods
from lightning_amp.techniques.sharded_step import RUNNING
from lightning_amp.techniques.table import STRATEGIES, own_steps, targets_of, technique_of_steps
from lightning_amp.techniques.tensor3d.grid_seconds import Message, sent_seconds

MOST_SHOWN = 2
"""Number of operators named in a note, those that send most bytes first."""
MOST_MOVED = 0.1
"""Share of a forward pass's bytes from which a note names the operators that require gathered features."""


class DrySteps:
    """A technique that replaces the module's steps, and a mesh axis without other ranks for counting them.

    Attributes:
        ranks, run_ranks: Ranks of the model axis, and of the run.
        budget: Bytes of one device; None if not known.
        chosen: Whether the spec is complete; otherwise `choose` completes it.
        sent: Collectives that rank 0 would have issued for the last batch.
        axis: The model axis of a dry run, on which nothing is sent.
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
        self.name, self.ranks, self.chosen = name, ranks, chosen
        self.spec: Any = spec
        self.run_ranks, self.budget = ranks if run_ranks is None else run_ranks, budget
        self.sent: list[Sent] = []
        self.notes: tuple[str, ...] = ()
        self._looking: Mapping[str, Callable[..., Any]] = {}
        self.axis = MeshAxis("model", ranks, 0, None, sent=self.sent)

    @classmethod
    def of_request(
        cls, strategies: Iterable[str], options: Any, ranks: int, *, run_ranks: int, budget: int | None = None
    ) -> "DrySteps | None":
        """Create the dry steps of the requested technique that has its own steps, with the user's options; else None.

        Raises:
            PlanError: An option is not supported, or a grid does not divide the ranks of the run.
        """
        name = technique_of_steps(strategies)
        if not name or (options_of := STRATEGIES[name].options) is None:
            return None
        ((_, spec),) = targets_of(name, None)  # type: ignore[arg-type]
        spec, chosen = options_of(spec, options)
        needed = getattr(spec, "ranks", 1)
        if run_ranks % needed:
            raise PlanError(
                f"a grid of {needed} ranks was given for {run_ranks} ranks, which are no multiple of it; change the"
                " grid, or the number of ranks (`devices` of the Trainer)"
            )
        return cls(name, spec, ranks, run_ranks=run_ranks, budget=budget, chosen=chosen)

    def put(self, module: LightningModule) -> Callable[[], None]:
        """Replace the module's steps; return an undo."""
        if self._looking:
            technique = own_steps(self.name).load()
            if hasattr(technique, "refuse"):
                technique.refuse(module)
            looks = {
                name: wraps(getattr(type(module), name), assigned=())(step) for name, step in self._looking.items()
            }
            return put_methods(module, {name: MethodType(look, module) for name, look in looks.items()})
        axis = self.axis
        if STRATEGIES[self.name].data_axis:
            axis = MeshAxis("ranks", self.run_ranks, 0, None, sent=self.sent)
        undo = install_steps(module, self.name, self.spec, axis)
        for name in STEPS:
            if (step := vars(module).get(name)) is not None:
                # `undo` takes it away with the step that it wraps
                put_methods(module, {name: MethodType(self._counting(step.__func__), module)})
        return undo

    def _counting(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a step that begins with nothing sent; it runs several times, and may fail on fake tensors first."""

        @wraps(step)
        def begun(module: LightningModule, *args: Any, **kwargs: Any) -> Any:
            if not RUNNING.get():
                self.sent.clear()
            return step(module, *args, **kwargs)

        return begun

    def choose(self, batch: Any, count: Callable[[], CountedStep], links: Links) -> CountedStep | None:
        """Choose the spec: the fastest grid that fits, or for other techniques the dims of the batch with least peak.

        Returns the counted step with the chosen spec, if it was counted last; else None.

        Args:
            count: Function that counts the step with the current spec.

        Raises:
            ShardError: No spec supports the step.
        """
        if self.chosen:
            return None

        def look(steps: Mapping[str, Callable[..., Any]]) -> None:
            """Run the step once with other functions instead of the module's."""
            self._looking = steps
            try:
                count()
            finally:
                self._looking = {}

        technique = own_steps(self.name).load()
        if hasattr(technique, "choose"):
            found: CountedStep
            found, notes = technique.choose(self, look, count, links)
            self.notes, self.chosen = tuple(map(Explanation, notes)), True
            return found
        self.choose_dims(batch, lambda: count().profile.peak_bytes, look)
        return None

    def choose_dims(self, batch: Any, count: Callable[[], int], look: Callable[..., None] | None = None) -> None:
        """Choose the dims of the batch with the least peak; `count` returns it for the current spec.

        Raises:
            ShardError: No spec supports the step.
        """
        technique = own_steps(self.name).load()
        # without a grid, all options are counted: which dims save most memory follows only from a count
        options = technique.options(batch, self.spec, self.ranks, look)
        peaks, refused = list[tuple[int, Spec]](), list[str]()
        for spec in options:
            self.spec = spec
            try:
                peaks.append((count(), spec))
            except AmpError as error:
                refused.append(f"{spec}: {error.__cause__ or error}")
        if not peaks:
            raise ShardError(
                f"{self.name} has no dims of the batch along which this step can be split over {self.ranks} ranks:"
                f" {'; '.join(refused) or 'no tensor of the batch has a dim of as many indices'}"
            )
        self.spec, self.chosen = min(peaks, key=lambda pair: pair[0])[1], True

    def messages(self) -> tuple[Message, ...]:
        """Return the collectives of the last batch."""
        priced = ((one, cast(Kind, "exchange" if one.kind == "ring" else one.kind)) for one in self.sent)
        return tuple(Message(kind, one.n_bytes, one.axis) for one, kind in priced)

    def sent_seconds(self, links: Links) -> float:
        """Return the seconds of the last batch's collectives, without overlap with compute."""
        return sent_seconds(self.messages(), {one.axis: one.ranks for one in self.sent}, links)

    def sent_notes(self) -> Iterator[str]:
        """Yield what rank 0 sends in one batch, and a warning if operators gather much of it."""
        row, by_operator, moved = STRATEGIES[self.name], Counter[str](), Counter[str]()
        if not self.sent:
            yield Explanation(f"{self.name} sends nothing over the model axis but gradients")
            return
        forward_bytes = sum(one.n_bytes for one in self.sent if not one.backward)
        for one in self.sent:
            by_operator[one.why] += one.n_bytes
            moved[one.why] += 0 if one.backward else one.n_bytes * one.moves
        kinds = Counter(one.kind for one in self.sent).most_common()
        most = [f"{format_bytes(n)} for {why}" for why, n in by_operator.most_common(MOST_SHOWN) if why]
        listed = ", ".join(f"{n} {kind}" for kind, n in kinds) + f"){'; most: ' if most else ''}{', '.join(most)}"
        whole = format_bytes(by_operator.total())
        if row.data_axis:
            yield Explanation(f"over its grid a rank sends {whole} a batch ({listed}")
        else:
            yield Explanation(f"over the model axis a rank sends {whole} a batch in addition to gradients ({listed}")
        if row.data_axis and moved.total() > MOST_MOVED * forward_bytes:
            named = ", ".join(f"{why} ({format_bytes(n)})" for why, n in moved.most_common(MOST_SHOWN) if n)
            yield (
                f"{format_bytes(moved.total())} of the {format_bytes(forward_bytes)} that a forward pass sends are for"
                f" operators that need features whole, which is exact and slow: {named}"
            )


def with_spec(plan: Plan, steps: DrySteps | None, why: str) -> Plan:
    """Return the plan with the spec of a technique with steps, from the request, a given plan or the first batch.

    Raises:
        PlanError: The spec is not known.
    """
    if steps is None:
        return plan
    # evaluations count no step; with a given grid, parameters can be sharded without layouts too
    row, given = STRATEGIES[steps.name], bool(getattr(steps.spec, "grid", ""))
    if not steps.chosen and (why or not (row.data_axis and given)):
        found = f"which fails: {why}" if why else "and none is counted in this run"
        # a grid alone does not decide how layers are sharded
        hint = "" if why and row.data_axis else f". {own_steps(steps.name).uncounted}"
        raise PlanError(f"{steps.name} finds how it splits by a count of the first batch's step, {found}{hint}")
    rules = (replace(rule, spec=steps.spec) if rule.strategy == steps.name else rule for rule in plan.rules)
    return replace(plan, rules=tuple(rules))
