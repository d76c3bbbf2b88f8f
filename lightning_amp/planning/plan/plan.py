"""Define `Plan`, frozen data that round-trips through JSON: what to install where, why, and its predicted memory.

Legend: bytes are per rank; `strata_bytes[k]` is the memory held right after stratum k of the forward pass.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lightning_amp.costs.profiled_step import Stage
from lightning_amp.costs.rule import Rule, Spec
from lightning_amp.errors import PlanError
from lightning_amp.planning.plan.device_bytes import DeviceBytes
from lightning_amp.planning.plan.mesh_shape import MeshShape
from lightning_amp.techniques.data.row import BalanceCells
from lightning_amp.techniques.hic.rows import RETAINED, StreamStrata
from lightning_amp.techniques.table import STRATEGIES, conflicts, specs_by_name, technique_of_steps, without_blocks


@dataclass(frozen=True, kw_only=True, slots=True)
class Axes:
    """One choice on each axis of a decomposed decoder; a form that a rule requests is part of the name."""

    placement: str = "replicated"
    features: str = "all"
    attention: str = "eager"
    decode: str = "full"
    likelihood: str = "dense"
    activations: str = RETAINED
    kernels: str = "eager"

    @classmethod
    def of(cls, strategies: Iterable[str], specs: Iterable[Spec] = ()) -> "Axes":
        """Return the choices of some strategies, and the eager choice on the other axes.

        Args:
            specs: Specs of their rules, if these may differ from the usual ones.
        """
        specs = tuple(specs)
        choosing = without_blocks(strategies, specs)
        choices = [
            *(STRATEGIES[strategy].choice for strategy in choosing),
            *(getattr(spec, "choice", None) for spec in specs),
        ]
        axes = cls(**dict(choice for choice in choices if choice is not None))
        # if strata or anchors are sharded, S2 shards only layers outside the decoder
        return axes if axes.placement not in ("strata", "nodes") else replace(axes, features="all")


NEEDLESS = "{} was not looked for, which takes seconds: no budget asks for less memory"
"""Reason in `does_not_help` of a technique that was not searched and may help."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleDiagnosis:
    """Diagnosis of the second training step on one device, with nothing installed.

    Attributes:
        largest: The largest part of the peak, one of module_profile.PARTS.
        evidence: One sentence per finding, with its numbers.
        helps: Technique id -> effect on the peak, the most helpful first.
        does_not_help: Technique id -> why it would not help.
        peak_bytes: The peak.
        parts: Bytes of the peak by part.
        modules: Modules that hold most at the peak, largest first, without their children's bytes.
        measured: "fake tensors", or "a real step".
        reason: Why the step could not run on fake tensors; "" if it could.
    """

    largest: str
    evidence: tuple[str, ...]
    helps: dict[str, str]
    does_not_help: dict[str, str]
    peak_bytes: int
    parts: dict[str, int]
    modules: dict[str, int]
    measured: str
    reason: str


ANSWERS = ("fits", "would_help", "largest_batch", "fewest_devices", "largest_length")
"""What the JSON form says for programs that read it, and `from_json` leaves out."""
SCHEMA = 2
"""Version of the JSON form. 2: places of `replay` do not count views, and a rule of `chunk` has the device's rates."""


class Explanation(str):
    """A note that explains a choice; the full report shows it, the summary of a run does not.

    A plan that was read from JSON has plain notes, which the summary shows.
    """

    __slots__ = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One legal plan.

    Attributes:
        strategies: Strategy ids.
        data: Ranks of the data axis.
        model: Ranks of the model axis.
        peak_bytes: Predicted peak per rank of a training step.
        step_seconds: Predicted time of the decoder's part of a step; without a decoder, of a step.
        cell_seconds: Time per cell over all ranks, by which candidates are compared.
        verdict: "chosen", or why it was not chosen.
    """

    strategies: tuple[str, ...]
    data: int
    model: int
    peak_bytes: int
    step_seconds: float
    cell_seconds: float
    verdict: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """Prediction of the validation in a fit, on one rank.

    Attributes:
        peak_bytes: Peak of its step, with what training keeps between steps.
        training_bytes: Peak of a training step.
        batch_size: Length of the batch that it was counted with; None if its tensors have none in common.
        largest_batch: Longest batch that fits, if this one does not; None if it does, or is not known.
        loader: Index of its loader, the one that needs most; None if there is one.
        no_chunks: Why it cannot run in chunks where it should; "" if it can, or need not.
        rules: Rules that run it in chunks; they are installed during validation only.
    """

    peak_bytes: int
    training_bytes: int
    batch_size: int | None
    largest_batch: int | None = None
    loader: int | None = None
    no_chunks: str = ""
    rules: tuple[Rule, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Techniques to install, with the predicted memory and time.

    Attributes:
        policy: Policy that chose the strategies: "auto", "paper", or "strategies" for the user's choice.
        signals: Raised bottleneck signals.
        evidence: One sentence per checked signal, raised or not.
        strategies: Strategy ids; empty means single-device execution.
        mesh: Ranks per axis.
        axes: The decoder's choices.
        rules: Transformations, in the order of installation.
        batch_size: Cells per rank and modality that the prediction is for.
        predicted_base_bytes: M_base of the EPM: all but the strata; without a decoder, bytes kept between steps.
        predicted_stratum_bytes: Mean Delta M of the EPM, per stratum.
        predicted_peak_bytes: Predicted peak per rank of the largest phase: a training step, or the validation.
        strata_bytes: Predicted bytes held after each stratum of the forward pass.
        budget_bytes: Bytes that tensors may take on one device, None if unknown. On a GPU less than its memory, by what
            `on_device` has.
        balance_cells: Whether to balance contacts over the ranks.
        notes: Further notes for the user, one sentence each: warnings, and each `Explanation`.
        predicted_step_seconds: Predicted time of the decoder's part of a step; for a model without a decoder, of the
            complete step; None if unknown.
        predicted_rest_seconds: Predicted time of the rest of the step, None unless the model is the reference model.
        rates_device: Device whose rates the time is predicted with, "" if unknown.
        candidates: Plans that policy "auto" has compared, the chosen one first.
        diagnosis: Diagnosis of the module's step; None if it has a decoder, or was not profiled.
        stages: Prediction per pipeline stage; empty without a pipeline, or if the step was not profiled.
        evaluates: Method whose peak is predicted in a run that does not train, such as "predict_step"; "" in a fit, or
            if it was not counted.
        validation: Prediction of a fit's validation; None if it has none, or if it was not counted.
        uncounted: Why the peak is unknown and `predicted_peak_bytes` only a lower bound; "" if it is known.
        on_device: What a process takes of a GPU, with the budget that it may take; None on a CPU.
    """

    policy: str
    signals: tuple[str, ...]
    evidence: tuple[str, ...]
    strategies: tuple[str, ...]
    mesh: MeshShape
    axes: Axes
    rules: tuple[Rule, ...]
    batch_size: int
    predicted_base_bytes: int
    predicted_stratum_bytes: int
    predicted_peak_bytes: int
    strata_bytes: tuple[int, ...]
    budget_bytes: int | None
    balance_cells: bool = False
    notes: tuple[str, ...] = ()
    predicted_step_seconds: float | None = None
    predicted_rest_seconds: float | None = None
    rates_device: str = ""
    candidates: tuple[Candidate, ...] = ()
    diagnosis: ModuleDiagnosis | None = None
    stages: tuple[Stage, ...] = ()
    evaluates: str = ""
    validation: Validation | None = None
    uncounted: str = ""
    on_device: DeviceBytes | None = None
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        """Check that the plan is consistent.

        Raises:
            PlanError: The plan contradicts itself; the message names every contradiction.
        """
        problems = list(_kinds(self)) or list(_contradictions(self))
        if problems:
            raise PlanError(
                f"the plan contradicts itself: {'; '.join(problems)}. Make the plan with `lightning-amp plan`, or"
                " change all of these parts"
            )

    @property
    def fits(self) -> bool | None:
        """Whether the predicted peak is within the budget; on a GPU, whether what a process takes is.

        None if the budget is unknown, or if the peak is unknown and its lower bound is within the budget.
        """
        if self.budget_bytes is None:
            return None
        within = self.predicted_peak_bytes <= self.budget_bytes if self.on_device is None else self.on_device.fits
        if not within:
            return False
        counted = self.strata_bytes or self.diagnosis is not None or self.evaluates
        return True if counted and not self.uncounted else None

    @property
    def training_bytes(self) -> int:
        """Predicted peak per rank of a training step."""
        return self.predicted_peak_bytes if self.validation is None else self.validation.training_bytes

    @property
    def largest_phase(self) -> str:
        """Method of the module in which the peak is predicted."""
        found = self.validation
        validates = found is not None and found.peak_bytes > found.training_bytes
        return self.evaluates or ("validation_step" if validates else "training_step")

    @property
    def gradient_ranks(self) -> int:
        """Ranks over which gradients are averaged: the data axis, and the model axis if that splits samples."""
        return self.mesh.data * (self.mesh.model if technique_of_steps(self.strategies) else 1)

    def spec_of(self, strategy: str) -> Spec:
        """Return the spec of a strategy that has one rule."""
        return next(rule.spec for rule in self.rules if rule.strategy == strategy)

    @property
    def fails_at_stratum(self) -> int | None:
        """First stratum after which the prediction exceeds the budget, None if the forward pass fits."""
        if self.budget_bytes is None:
            return None
        return next((k for k, n in enumerate(self.strata_bytes) if n > self.budget_bytes), None)

    def to_json(self, answers: Mapping[str, Any] = MappingProxyType({})) -> str:
        """Return the plan as indented JSON; each rule's spec is tagged with its type. `answers` are added."""
        plain, found = asdict(self), self.validation
        tagged = list(zip(self.rules, plain["rules"], strict=True))
        tagged += [] if found is None else zip(found.rules, plain["validation"]["rules"], strict=True)
        for rule, row in tagged:
            row["spec"] = {"type": type(rule.spec).__name__, **row["spec"]}
        return json.dumps(plain | {"fits": self.fits} | dict(answers), indent=2)

    @classmethod
    def from_json(cls, text: str, *, source: str = "the plan") -> "Plan":
        """Read the output of `to_json`.

        Raises:
            PlanError: Not JSON, another schema, or fields that are missing or unknown.
        """
        try:
            plain = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PlanError(
                f"{source} is not JSON: {error}; write it with `lightning-amp plan ... --format json`"
            ) from error
        if not isinstance(plain, dict) or plain.get("schema") != SCHEMA:
            found = plain.get("schema") if isinstance(plain, dict) else plain
            raise PlanError(
                f"{source} has schema {found!r}, and this version reads schema {SCHEMA}; write it again with"
                " `lightning-amp plan ... --format json`"
            )
        plain = {name: value for name, value in plain.items() if name not in ANSWERS}
        try:
            return cls(**_typed(plain))
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            names = sorted(f.name for f in fields(cls))
            raise PlanError(
                f"{source} does not read as a plan: {error}; its fields are {names}. Write it again with"
                " `lightning-amp plan ... --format json`"
            ) from error

    @classmethod
    def read(cls, path: str | Path) -> "Plan":
        """Read a plan file.

        Raises:
            PlanError: The file cannot be read, or is not a plan.
        """
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"plan={str(path)!r} cannot be read: {error}; give the path of a plan's JSON") from error
        return cls.from_json(text, source=str(path))


def _typed(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Convert JSON values back to tuples and dataclasses."""
    typed = {name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()}
    typed["mesh"] = MeshShape(**plain["mesh"])
    typed["axes"] = Axes(**plain["axes"])
    candidates = plain.get("candidates", ())
    typed["candidates"] = tuple(Candidate(**c | {"strategies": tuple(c["strategies"])}) for c in candidates)
    typed["stages"] = tuple(Stage(**stage) for stage in plain.get("stages", ()))
    if (found := plain.get("diagnosis")) is not None:
        typed["diagnosis"] = ModuleDiagnosis(**{"reason": "", **found, "evidence": tuple(found["evidence"])})
    if (device := plain.get("on_device")) is not None:
        typed["on_device"] = DeviceBytes(**{**device, "measured": tuple(device["measured"])})
    typed["rules"] = _rules(plain["rules"])
    if (validation := plain.get("validation")) is not None:
        typed["validation"] = Validation(**{**validation, "rules": _rules(validation["rules"])})
    return typed


def _rules(plain: Iterable[Mapping[str, Any]]) -> tuple[Rule, ...]:
    return tuple(Rule(**{**rule, "spec": _spec(rule["spec"])}) for rule in plain)


def _spec(plain: Mapping[str, Any]) -> Spec:
    kind, known = plain["type"], specs_by_name()
    if kind not in known:
        raise PlanError(
            f"a rule of the plan has the type {kind!r}; this version knows {sorted(known)}. If a "
            "package of yours registers it, import that package before the plan is read"
        )
    return known[kind](**{name: value for name, value in plain.items() if name != "type"})


def _kinds(plan: Plan) -> Iterator[str]:
    """Yield errors on the types of values that a user may edit."""
    counts = {"batch_size": plan.batch_size, "predicted_peak_bytes": plan.predicted_peak_bytes}
    if plan.budget_bytes is not None:
        counts["budget_bytes"] = plan.budget_bytes
    for name, value in counts.items():
        if type(value) is not int or value < 0:
            yield f"{name}={value!r} is not a whole number of 0 or more"
    if type(plan.balance_cells) is not bool:
        yield f"balance_cells={plan.balance_cells!r} is neither true nor false"
    for name in ("signals", "evidence", "strategies", "notes"):
        if not all(isinstance(text, str) for text in getattr(plan, name)):
            yield f"{name}={getattr(plan, name)!r} holds something other than text"
    yield from (f"fqn={rule.fqn!r} is not text" for rule in plan.rules if not isinstance(rule.fqn, str))


def _contradictions(plan: Plan) -> Iterator[str]:
    unknown = sorted(set(plan.strategies) - set(STRATEGIES))
    if unknown:
        yield (
            f"strategies={unknown!r} are not of {', '.join(STRATEGIES)} (a package that registers them has to be"
            " imported first)"
        )
        return
    yield from conflicts(without_blocks(plan.strategies, (rule.spec for rule in plan.rules)))
    for name in plan.strategies:
        if (check := STRATEGIES[name].contradictions) is not None:
            specs = dict.fromkeys(rule.spec for rule in plan.rules if rule.strategy == name)
            yield from check(list(specs), plan.gradient_ranks)
    ruled = {rule.strategy for rule in plan.rules}
    if ruled != set(plan.strategies):
        yield f"strategies={list(plan.strategies)!r}, but its rules are for {sorted(ruled)!r}"
    for rule in plan.rules:
        owner = next((s for s, info in STRATEGIES.items() if type(rule.spec) in info.specs), "of no strategy")
        if rule.strategy != owner:
            yield f"a rule of {rule.strategy} asks for {type(rule.spec).__name__}, which is {owner}"
    allowed = type(plan.axes).of(plan.strategies, (rule.spec for rule in plan.rules))
    for axis, choice in asdict(allowed).items():
        if getattr(plan.axes, axis) != choice:
            yield f"axes.{axis}={getattr(plan.axes, axis)!r}, with these strategies it is {choice!r}"
    together = plan.axes.features == "sharded" or plan.axes.placement not in ("replicated", "strata")
    together = together or plan.axes.kernels == "compiled"
    for rule in plan.rules:
        if together and isinstance(rule.spec, StreamStrata) and rule.spec.workers != 1:
            why = "strata are compiled" if plan.axes.kernels == "compiled" else "ranks compute each stratum together"
            yield f"workers={rule.spec.workers!r}, where {why}, in one order: it is 1"
    if plan.balance_cells != any(isinstance(rule.spec, BalanceCells) for rule in plan.rules):
        yield f"balance_cells={plan.balance_cells!r}, and the rules say otherwise"
