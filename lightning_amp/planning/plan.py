"""A Plan is inert, frozen, JSON-round-trippable data: what to install where, why, and the memory it will take.

Legend: bytes are per rank; `strata_bytes[k]` is the memory held right after stratum k of the forward pass.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from lightning_amp.errors import PlanError
from lightning_amp.planning.candidate import Candidate
from lightning_amp.planning.consistency import check_consistency
from lightning_amp.planning.specs import Spec
from lightning_amp.planning.strategies import STRATEGIES, special_choice, specs_by_name

SCHEMA = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One transformation: which modules, what, and why.

    Attributes:
        fqn: Name of the module, or a pattern in the sense of fnmatch; "" is the whole LightningModule.
        spec: What to install there.
        strategy: The strategy of the library that the rule belongs to, such as "S3".
        why: The finding that asked for it.
        saves_bytes: Predicted bytes per rank that it saves, 0 when it saves time or exactness.
    """

    fqn: str
    spec: Spec
    strategy: str
    why: str
    saves_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshShape:
    """Ranks along the two axes of the device mesh; the model axis is innermost."""

    data: int
    model: int

    def __post_init__(self) -> None:
        if not all(type(n) is int and n >= 1 for n in (self.data, self.model)):
            raise PlanError(
                f"a mesh of {self.data!r} x {self.model!r} was asked for; both axes need a whole number of 1 or more"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Axes:
    """One choice on each axis of a decomposed decoder; a form that a rule asks for is part of the name."""

    placement: str = "replicated"
    features: str = "all"
    attention: str = "eager"
    decode: str = "full"
    likelihood: str = "dense"
    activations: str = "retain"

    @classmethod
    def of(cls, strategies: Iterable[str], specs: Iterable[Spec] = ()) -> "Axes":
        """The choices of some strategies of the library, and on the other axes the eager ones.

        Args:
            strategies: Their ids.
            specs: What their rules ask for, where that may not be the usual.
        """
        choices = [*(STRATEGIES[strategy].choice for strategy in strategies), *map(special_choice, specs)]
        axes = cls(**dict(choice for choice in choices if choice is not None))
        # where strata or anchors are split, S2 is left with the layers outside the decoder
        return axes if axes.placement not in ("strata", "nodes") else replace(axes, features="all")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What the strategy will do.

    Attributes:
        policy: Policy that made it: "auto", "paper" or "strategies" when the user named them.
        signals: Raised bottleneck signals.
        evidence: One sentence per signal looked for, raised or not.
        strategies: Strategy ids; empty means single-device execution.
        mesh: Ranks per axis.
        axes: The decoder's choices.
        rules: Transformations, in the order of installation.
        batch_size: Cells per rank and modality that the prediction is for.
        predicted_base_bytes: M_base of the EPM: all but the strata.
        predicted_stratum_bytes: Mean Delta M of the EPM, per stratum.
        predicted_peak_bytes: Predicted peak per rank of a training step.
        strata_bytes: Predicted bytes held after each stratum of the forward pass.
        budget_bytes: Memory of one device, None when unknown.
        balance_cells: Whether to balance contacts over the ranks.
        notes: Everything else a person should know, one sentence each.
        predicted_step_seconds: Predicted time of the decoder's part of a step, None without a decoder.
        rates_device: Whose rates that time is predicted with, "" without a decoder.
        candidates: What policy "auto" has compared, the chosen one first.
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
    rates_device: str = ""
    candidates: tuple[Candidate, ...] = ()
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        """Refuse a plan that contradicts itself.

        Raises:
            PlanError: It would train something else than it says.
        """
        check_consistency(self)

    @property
    def fits(self) -> bool | None:
        """Whether the predicted peak is within the budget; None when the budget or the activations are unknown."""
        if self.budget_bytes is None or not self.strata_bytes:
            return None
        return self.predicted_peak_bytes <= self.budget_bytes

    @property
    def fails_at_stratum(self) -> int | None:
        """The first stratum after which the prediction exceeds the budget, None when the forward pass fits."""
        if self.budget_bytes is None:
            return None
        return next((k for k, n in enumerate(self.strata_bytes) if n > self.budget_bytes), None)

    def to_json(self) -> str:
        """The plan as indented JSON; each rule's spec is tagged with its type."""
        plain = asdict(self)
        for rule, row in zip(self.rules, plain["rules"], strict=True):
            row["spec"] = {"type": type(rule.spec).__name__, **row["spec"]}
        return json.dumps(plain | {"fits": self.fits}, indent=2)

    @classmethod
    def from_json(cls, text: str, *, source: str = "the plan") -> "Plan":
        """Read what `to_json` wrote.

        Raises:
            PlanError: Not JSON, another schema, or fields that are missing or unknown.
        """
        try:
            plain = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PlanError(f"a plan as JSON was asked for, {source} is not JSON: {error}") from error
        if not isinstance(plain, dict) or plain.get("schema") != SCHEMA:
            found = plain.get("schema") if isinstance(plain, dict) else plain
            raise PlanError(
                f"a plan of schema {SCHEMA} was asked for, {source} has schema {found!r}; write it again with"
                " `lightning-amp plan ... --format json`"
            )
        plain.pop("fits", None)
        try:
            return cls(**_typed(plain))
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            names = sorted(f.name for f in fields(cls))
            raise PlanError(f"{source} does not read as a plan: {error}; its fields are {names}") from error

    @classmethod
    def read(cls, path: str | Path) -> "Plan":
        """Read a plan file.

        Raises:
            PlanError: The file cannot be read, or is not a plan.
        """
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"plan={str(path)!r} was asked for and cannot be read: {error}") from error
        return cls.from_json(text, source=str(path))


def _typed(plain: Mapping[str, Any]) -> dict[str, Any]:
    """JSON values back to tuples and dataclasses."""
    typed = {name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()}
    typed["mesh"] = MeshShape(**plain["mesh"])
    typed["axes"] = Axes(**plain["axes"])
    candidates = plain.get("candidates", ())
    typed["candidates"] = tuple(Candidate(**c | {"strategies": tuple(c["strategies"])}) for c in candidates)
    typed["rules"] = tuple(Rule(**{**rule, "spec": _spec(rule["spec"])}) for rule in plain["rules"])
    return typed


def _spec(plain: Mapping[str, Any]) -> Spec:
    kind, known = plain["type"], specs_by_name()
    if kind not in known:
        raise PlanError(
            f"a rule asks for {kind!r}; this version can install {sorted(known)}. If a package of yours registers"
            " it, import that package before the plan is read"
        )
    return known[kind](**{name: value for name, value in plain.items() if name != "type"})
