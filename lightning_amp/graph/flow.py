"""Define flow rules: which dim of an operator's result follows which dim of its arguments. Does not import torch.

A dim of a result follows a dim of an argument if a piece of the result requires only the same piece of the argument.
Without a rule, no dim of an operator follows, and a dim that is summed over has no dim in the result. Flow is never
guessed.

A dim that is split or merged follows by its outermost factor: the number of pieces must divide it.

A second table of rules defines which dims an operator sums over: if these are cut, the results of pieces add up.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from lightning_amp.errors import ModelError
from lightning_amp.graph.table import Dims, Sums

Shape = tuple[int, ...]
Follows = list[list[tuple[int, int]]]


class Ref(NamedTuple):
    """Placeholder for the k-th tensor among an operator's arguments."""

    k: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorCall:
    """One call of an operator.

    Attributes:
        op: Name without overload, such as "linear".
        shapes: Shapes of its tensor arguments.
        result: Shape of its result; for several results, of the first.
        arguments: All arguments by name, defaults included; a tensor is a Ref.
    """

    op: str
    shapes: tuple[Shape, ...]
    result: Shape
    arguments: dict[str, Any] = field(default_factory=dict)

    def ref(self, name: str) -> int | None:
        """Return the index of an argument among the tensors; None if the argument is not a tensor."""
        found = self.arguments.get(name)
        return found.k if isinstance(found, Ref) else None


FlowRule = Callable[[OperatorCall], Follows]
"""A rule for flow or for sums; for sums, each list is a group of (tensor argument, dim) that are summed together."""
RULES: dict[str, FlowRule] = {}
SUM_RULES: dict[str, FlowRule] = {}


def register_flow(*ops: str) -> Callable[[FlowRule], FlowRule]:
    """Register how the dims of an operator's result follow those of its arguments, to run it in chunks.

    Operators are named as in `torch.ops.aten`, or "namespace::name" for those of another library.

    The rule takes an OperatorCall, and returns for every dim of the result the pairs (tensor argument, dim) that it
    follows. Plans rely on it: a piece of the result must equal the operator's result for the same pieces of these
    arguments. If it does not, an InstallError is raised before the block computes anything in chunks.

    Example: an operator sorts every row; result rows follow the argument's rows, columns follow nothing.

        @lightning_amp.register_flow("mylib::sorted_rows")
        def sorted_rows(call):
            return [[(0, 0)], []]

    Raises:
        ModelError: An operator has a rule already.
    """

    def add(rule: FlowRule) -> FlowRule:
        known = sorted(set(ops) & RULES.keys())
        if known:
            raise ModelError(f"a flow rule was registered for {known[0]!r}, which has one; name another operator")
        RULES.update(dict.fromkeys(ops, rule))
        return rule

    return add


def dims_of(call: OperatorCall) -> Dims | None:
    """Return the dims that the dims of a result follow; None if the operator has no rule.

    Raises:
        ModelError: A rule returned a wrong number of dims, or dims that do not exist.
    """
    rule = RULES.get(call.op)
    if rule is None:
        return None
    found = rule(call)
    inside = all(k < len(call.shapes) and 0 <= d < len(call.shapes[k]) for dim in found for k, d in dim)
    if len(found) != len(call.result) or not inside:
        raise ModelError(
            f"the flow rule of {call.op!r} says {found!r} of a result of shape {call.result!r} and arguments of shapes"
            f" {call.shapes!r}; one list of (argument, dim) per dim of the result is allowed"
        )
    return tuple(tuple(dim) for dim in found)


def sums_over(*ops: str) -> Callable[[FlowRule], FlowRule]:
    """Register a rule for the dims that operators sum over, in addition to their flow rule."""

    def add(rule: FlowRule) -> FlowRule:
        SUM_RULES.update(dict.fromkeys(ops, rule))
        return rule

    return add


def sums_of(call: OperatorCall) -> Sums:
    """Return the groups of dims that a call sums over; empty without a rule."""
    rule = SUM_RULES.get(call.op)
    return tuple(tuple(group) for group in rule(call)) if rule else ()


def nothing(call: OperatorCall) -> Follows:
    """Return that no dim follows any other."""
    return [[] for _ in call.result]


def broadcast(shape: Shape, k: int, result: Shape) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield the dims of a result that follow an argument which is broadcast to it, as (dim, (argument, its dim))."""
    # a dim of size 1 that is broadcast follows nothing, because every piece needs it whole
    offset = len(result) - len(shape)
    return ((d + offset, (k, d)) for d, n in enumerate(shape) if d + offset >= 0 and n == result[d + offset])


def collect(result: Shape, pairs: Iterable[tuple[int, tuple[int, int]]]) -> Follows:
    """Group pairs of (dim, followed dim) by dim."""
    found: Follows = [[] for _ in result]
    for dim, source in pairs:
        found[dim].append(source)
    return found


def same_but(call: OperatorCall, without: Iterable[int]) -> Follows:
    """Return that every dim except `without` follows that of the first argument."""
    ends = {d % len(call.result) for d in without} if call.result else set()
    return [[] if d in ends else [(0, d)] for d in range(len(call.result))]


def groups(before: Shape, after: Shape) -> list[tuple[list[int], list[int]]]:
    """Group the dims of two shapes such that products are equal in each group; dims of size 1 are omitted."""
    left = [d for d, n in enumerate(before) if n != 1]
    right = [d for d, n in enumerate(after) if n != 1]
    groups, a, b = [], list[int](), list[int]()
    # the side with the smaller product takes its next dim; a group is complete when the products are equal
    while left or right:
        if left and (not right or prod(before[d] for d in a) <= prod(after[d] for d in b)):
            a.append(left.pop(0))
        else:
            b.append(right.pop(0))
        if prod(before[d] for d in a) == prod(after[d] for d in b):
            groups.append((a, b))
            a, b = [], []
    return groups
