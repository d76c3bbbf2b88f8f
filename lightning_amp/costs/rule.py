"""Define `Rule`: which modules a plan changes, with which spec, and why."""

from collections.abc import Iterable
from dataclasses import Field, dataclass
from typing import Any, ClassVar, Protocol


class Spec(Protocol):
    """Options of a technique at one place: a frozen dataclass of numbers, texts, booleans and None, saved as JSON."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One transformation: which modules, what, and why.

    Attributes:
        fqn: Name of the module, or a pattern for fnmatch; "" is the LightningModule.
        spec: Options of the technique.
        strategy: Technique of the table that the rule belongs to, such as "S3".
        why: Finding that leads to the rule.
        saves_bytes: Predicted bytes per rank that it saves, 0 if it saves time or exactness.
    """

    fqn: str
    spec: Spec
    strategy: str
    why: str
    saves_bytes: int = 0


def changes_of(rules: Iterable[Rule]) -> tuple[tuple[str, Spec], ...]:
    """Return what rules change in a module, without who has chosen them and why; a key of counts."""
    return tuple((rule.fqn, rule.spec) for rule in rules)


def splits_parameters(rule: Rule) -> bool:
    """Whether a rule splits parameters over ranks and leaves activations alone; its spec has that as `splits`."""
    return getattr(rule.spec, "splits", False)


def splits_on_host(rule: Rule) -> bool:
    """Whether a rule splits parameters that lie in host memory; its spec has that as `on_host`."""
    return getattr(rule.spec, "on_host", False)


def runs_again(rule: Rule) -> bool:
    """Whether the block of a rule runs again in the backward pass; its spec has that as `again`."""
    return getattr(rule.spec, "again", False)
