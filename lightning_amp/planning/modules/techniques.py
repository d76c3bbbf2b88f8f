"""The techniques that any module may be planned with: how each changes a plan in the making, and what it leaves.

One row per technique, in the order in which they are added to a plan; a policy knows nothing of any of them but its
row. A technique that cannot be added answers with a sentence that says why, beginning with a verb's subject, such as
"there is one rank".
"""

from collections.abc import Callable
from dataclasses import dataclass

from lightning_amp.planning.modules.seen import Draft, Seen

Add = Callable[[Seen, Draft, int | None], Draft | str]
"""(step, plan so far, budget) -> the plan with the technique, as much of it as the budget asks for and all of it where
that is None or cannot be met; or why not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Technique:
    """A row.

    Attributes:
        add: Adds it to a plan.
        kinds: Kinds of bytes that it makes smaller.
        fewest: Ranks that it needs.
        counted: Whether a count of the step with its rules installed, on one device, has what it saves.
    """

    add: Add
    kinds: tuple[str, ...]
    fewest: int = 1
    counted: bool = True


TECHNIQUES: dict[str, Technique] = {}
