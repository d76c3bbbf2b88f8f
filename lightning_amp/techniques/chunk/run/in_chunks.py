"""Replace a module's forward by a generated one that stays within a memory budget, planned once per signature."""

import copy
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from lightning_amp._torch import unseen
from lightning_amp.errors import InstallError, ModelError, PlanError
from lightning_amp.footprint.find_blocks import find_blocks
from lightning_amp.graph.capture import Capture, capture
from lightning_amp.graph.guards import signature, state_of
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.chunk.regions.choose_chunks import CostModel, OverBudget
from lightning_amp.techniques.chunk.regions.costs import HasSpeed
from lightning_amp.techniques.chunk.run.by_blocks import plan_blocks
from lightning_amp.techniques.chunk.run.module_chunks import Planned, no_part_of_the_step, plain, same_calls
from lightning_amp.techniques.chunk.run.planned import plan_graph
from lightning_amp.techniques.rates_of import rates_of

MANY = 8
"""Number of blocks with children above which a module is planned block by block, in inference, if that meets the
budget: equal blocks are planned once, while the time to plan one graph grows with the square of its operators.
"""
OFTEN = 64
"""Number of signatures of a block after which a warning says that each of them has to be planned."""
ALIKE = 16
"""Further plans of one signature that are kept; the longest unused is removed first."""
KEPT = 4096
"""Plans of all blocks that are cached; the oldest is removed first."""


class InChunks:
    """Replacement of a forward, called as `forward(module, *args, **kwargs)`. Copies keep the plans, pickles do not.

    Attributes:
        known: Plans by budget, costs and signature.
        fqn: Name of the block, for messages.
        train: As the argument.
        captures_whole: Whether the complete block is captured, with the modules in it.

    Args:
        budget_bytes: Budget of one forward pass without gradients.
        train: With gradients, the budget bounds the forward and backward pass, with the tensors kept between them. It
            is the budget of a plan for one batch: a call that needs more runs with the least bytes, and warns.
        policy: Quantity to minimize, "auto" or "paper".
        rates: Rates of the device; None takes those of the module's device.
    """

    def __init__(
        self, budget_bytes: int, *, train: bool = False, policy: str = "auto", rates: HasSpeed | None = None
    ) -> None:
        self._budget_bytes, self.train, self._policy, self._rates = budget_bytes, train, policy, rates
        self.captures_whole = train
        self.known: dict[Any, Planned] = {}
        self._last: tuple[Any, Planned] | None = None
        self.fqn, self._n_planned = "", 0

    def installed_at(self, fqn: str, plans: dict[Any, Planned]) -> None:
        """Set the block's name, and share the plans of the model's other blocks."""
        self.fqn, self.known = fqn, plans

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return the module's result; a call with a new signature is planned first, and checked if it has values.

        Raises:
            InstallError: The generated forward gives a different result than the module (check.py).
        """
        planned = self.planned(module, args, kwargs)
        try:
            return planned.run(module, *args, **kwargs)
        except InstallError as error:
            raise (InstallError(f"{self.fqn}: {error}") if self.fqn else error) from None

    def planned(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Planned:
        """Return the plan of a call; it is made in the first call of each signature.

        Raises:
            PlanError: The budget cannot be met.
            ModelError: The module cannot be captured.
        """
        # without this override, which is a different object in every block: equal blocks share one plan
        own = plain(module)
        call = signature(own, args, kwargs)
        # most calls repeat the last signature, and comparing keys is faster than hashing them
        if self._last is None or self._last[0] != call:
            key = self._budget_bytes, self.train, self._policy, self._rates, call
            if key not in self.known:
                self.known[key] = self._new_plan(own, args, kwargs, call)
                if len(self.known) > KEPT:
                    del self.known[next(iter(self.known))]
            self._last = call, self.known[key]
        first = self._last[1]
        if first.capture is None:
            return first

        def more() -> Capture:
            others.append(self._new_plan(own, args, kwargs, call))
            assert others[-1].capture is not None, "a first plan of this call is a graph"
            return others[-1].capture

        others = [first, *first.others]
        captures = [one.capture for one in others if one.capture is not None]
        found = others[same_calls(own, args, kwargs, captures, more)]
        # the last one used comes first, as the next call is likely to repeat it
        first.others[:] = [one for one in (found, *others) if one is not first][:ALIKE]
        return found

    def _new_plan(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], call: Any) -> Planned:
        """Plan a call, and count it."""
        found = self._plan(module, args, kwargs, call)
        # bounds memory if every call is planned, as for a block that reads a number which changes in each step
        self._n_planned += 1
        if self._n_planned == OFTEN:
            warnings.warn(
                f"{self.fqn or 'a module'} was planned in chunks for {OFTEN} unlike calls, and each further one"
                " is planned too, which takes longer than the call. Pad inputs to a few lengths, keep no state"
                " in the block that every call changes, or leave 'chunk' out",
                stacklevel=2,
            )
        return found

    def _plan(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], key: Any) -> Planned:
        with unseen(), no_part_of_the_step():
            train = self.train and torch.is_grad_enabled()
            device = next((tensor.device for tensor in state_of(module).values()), torch.device("cpu"))
            costs = CostModel(policy=self._policy, rates=self._rates or rates_of(device)[0])
            n_blocks = sum(any(True for _ in block.children()) for block in find_blocks(module).values())
            if n_blocks > MANY and not train:
                reason = f"it has {n_blocks!r} blocks, which are planned one by one"
                # as one graph, the module may need less memory, or be the only thing that can be captured
                with suppress(PlanError, ModelError):
                    return plan_blocks(module, args, kwargs, self._budget_bytes, reason, costs)
            found = capture(module, args, kwargs, key=key)
            if found.graph is not None:
                return self._of_graph(found, costs, train=train)
            if train:
                hint = "name its blocks in the rule, or leave chunk out" if n_blocks else "leave it out of the rules"
                raise ModelError(
                    f"chunk does not support {type(module).__name__!r} in training, which cannot be"
                    f" captured: {found.reason}; {hint}"
                )
            return plan_blocks(module, args, kwargs, self._budget_bytes, found.reason, costs)

    def _of_graph(self, found: Capture, costs: CostModel, *, train: bool) -> Planned:
        planned, n_bytes = None, self._budget_bytes
        while planned is None:
            try:
                planned = plan_graph(found, n_bytes, train=train, costs=costs)
            except OverBudget as error:
                if not self.train:
                    raise
                # the least bytes depend slightly on the budget of the search
                n_bytes = max(error.least_bytes, n_bytes + n_bytes // 100 + 1)
        if n_bytes > self._budget_bytes:
            least, allowed = format_bytes(n_bytes), format_bytes(self._budget_bytes)
            given = [node.meta["val"] for node in found.nodes if node.op == "placeholder"][len(found.names) :]
            shapes = ", ".join(str(list(tensor.shape)) for tensor in given) or "no tensors"
            warnings.warn(
                f"a block {found.kind.__name__!r} has {allowed} by the plan, made for another batch; called with"
                f" {shapes} it needs {least} at least, in chunks, and takes that: plan for the largest batch",
                stacklevel=2,
            )
        return planned

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "known": {}, "_last": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> "InChunks":
        twin = copy.copy(self)
        # plans do not refer to the block that they were made for
        twin.known = self.known
        return twin
