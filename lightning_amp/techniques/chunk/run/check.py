"""Compare generated code with the block's own forward in float64, before training with it.

    compared    results, changed buffers, and gradients of all arguments and parameters for random output gradients;
                with the values of the first batch and equal random numbers
    call        with few positions, if the block can be called so (smaller_call.py), to save memory: the check concerns
                the operators, dims, sums and halos of the plan, not its sizes
    otherwise   the original call
    neither     a warning is given, if both would take more than the block's budget in float64, or do not run
    omitted     gradients of large parameters (`LARGE`), such as a head over a vocabulary, if the float64 copies and
                gradients of all parameters would exceed the budget

Every plan is checked once, in its first call with values. The block does not change: its parameters and buffers are
copied. A difference means that an operator does not follow the dims of its rule, such as with a wrong `register_flow`
rule.
"""

import warnings
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_amp._torch import FakeTensor, tree_flatten, tree_leaves, tree_unflatten
from lightning_amp.errors import InstallError
from lightning_amp.footprint.chain.block_call import autocast_again, autocast_now
from lightning_amp.footprint.copies.restore_state import restoring_state
from lightning_amp.graph.guards import state_of
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.checks.same_function import InFloat64, difference, failure, largest, outcome, widened
from lightning_amp.techniques.chunk.run.lower import Lowered
from lightning_amp.techniques.chunk.run.module_chunks import no_part_of_the_step, plain
from lightning_amp.techniques.chunk.run.smaller_call import Call, smaller_calls

RTOL = 1e-10
"""Largest allowed difference, as a share of the largest of all results, or of all gradients.

The scale is common because a tensor that is zero up to rounding has none. Another order of sums gives about 1e-15.
"""
KINDS = ("result", "buffer", "gradient")
LARGE = 16
"""A parameter is large if its float64 bytes exceed 1 / LARGE of the block's budget."""
Outcome = dict[str, Tensor | None]


class Checked:
    """Generated forward of a block, which is checked in its first call with values.

    Args:
        lowered: The generated forward.
        budget_bytes: Budget of the block, which also bounds the check.
        whole_bytes: Peak of the block's own forward, in training with its backward pass.
    """

    def __init__(self, lowered: Lowered, budget_bytes: int, whole_bytes: int) -> None:
        self._lowered, self._budget_bytes, self._whole_bytes = lowered, budget_bytes, whole_bytes
        self._done = not lowered.cut

    @property
    def code(self) -> str:
        """Python source of the forward."""
        return self._lowered.code

    def __call__(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return what the block returns; check the forward first if this is the first call with values."""
        self.check(block, args, kwargs)
        return self._lowered(block, *args, **kwargs)

    def check(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        """Check once that the generated forward computes what the block does; skipped for fake tensors.

        Raises:
            InstallError: The results differ.
        """
        given = (v for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor))
        tensors = [] if self._done else [*state_of(block).values(), *given]
        if not self._done and not any(isinstance(t, FakeTensor) for t in tensors):
            devices = sorted({tensor.device.index for tensor in tensors if tensor.device.type == "cuda"})
            # the check is not part of a step, and must not change its random state
            with no_part_of_the_step(), torch.random.fork_rng(devices), restoring_state(plain(block)):
                self._check(plain(block), args, kwargs, tensors)
            self._done = True

    def _check(self, block: nn.Module, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> None:
        calls: Iterable[tuple[Call, Lowered]] = smaller_calls(block, args, kwargs, self._lowered)
        widest = max((t.element_size() for t in tensors if t.is_floating_point()), default=8)
        n_bytes, most = self._whole_bytes * 8 // widest, max(1, _n_elements((args, kwargs)))
        why, least = "", n_bytes
        # one call that the block's own forward accepts is enough: it has every operator and dim of the plan
        for call, lowered in chain(calls, [((args, kwargs), self._lowered)]):
            # activations are about as many as the arguments
            taken = n_bytes * _n_elements(call) // most
            if taken > self._budget_bytes:
                least = min(least, taken)
                continue
            try:
                right = self._computed(block, call, lowered, own=True)
            except Exception as error:  # the user's forward: an index may exceed the remaining positions
                why = f"with fewer positions its own forward does not run in float64: {failure(error)}"
                continue
            self._compare(block, call, lowered, right)
            return
        why = why or f"in float64 it takes {format_bytes(least)} at least"
        name, own = self._lowered.capture.kind.__name__, format_bytes(self._budget_bytes)
        warnings.warn(
            f"what a block {name!r} computes in chunks, in {own}, was not compared with its own forward: {why}",
            stacklevel=2,
        )

    def _computed(self, block: nn.Module, call: Call, lowered: Lowered, *, own: bool) -> Outcome:
        learned = {n: 8 * p.numel() for n, p in block.named_parameters() if p.requires_grad}
        # a copy and two gradients, and the same again for temporaries
        all_fit = 6 * sum(learned.values()) <= self._budget_bytes
        large = frozenset(n for n, n_bytes in learned.items() if LARGE * n_bytes > self._budget_bytes)
        # warnings of libraries are ignored, also where the user turns warnings into errors
        with warnings.catch_warnings(action="ignore"):
            return _outcome(block, call, lowered, own=own, without=frozenset() if all_fit else large)

    def _compare(self, block: nn.Module, call: Call, lowered: Lowered, right: Outcome) -> None:
        found = self._computed(block, call, lowered, own=False)
        for kind in KINDS:
            named = {name: value for name, value in right.items() if name.startswith(kind)}
            scale = max((largest(value) for value in named.values() if value is not None), default=0.0)
            if wrong := difference(found, named, rtol=RTOL, scale=scale, equal_nan=True):
                break
        else:
            return
        shapes = ", ".join(str(list(v.shape)) for v in tree_leaves(call) if isinstance(v, Tensor))
        names = dict.fromkeys(
            str(node.target).rpartition(".")[0]
            for form in (lowered, lowered.inner)
            for region in (form.cut if form else ())
            for i, node in enumerate(form.capture.nodes if form else ())
            if region.first <= i <= region.last and i not in region.before and node.op == "call_function"
        )
        raise InstallError(
            f"a block {lowered.capture.kind.__name__!r} in chunks does not compute what its own forward does, called"
            f" with {shapes} in float64: it returns {wrong}. One of the operators in chunks does not follow the dims"
            f" that its rule says ({', '.join(names)}): correct the rule if it is one of `register_flow`, else leave"
            " the block out of the rules of chunk and report this. Nothing was computed with it"
        )


def _n_elements(call: Any) -> int:
    return sum(tensor.numel() for tensor in tree_leaves(call) if isinstance(tensor, Tensor))


def _outcome(
    block: nn.Module, call: Call, lowered: Lowered, *, own: bool, without: frozenset[str] = frozenset()
) -> Outcome:
    """Return results, buffers and gradients (but `without`) by name, of the block's own or the generated forward."""
    values, spec = tree_flatten(call)
    changed = lowered.capture.changed
    # buffers are always copied: BatchNorm kernels write to their statistics without a new version
    buffers = {name for name, _ in block.named_buffers()}
    state = {name: _leaf(x, copied=name in changed or name in buffers) for name, x in state_of(block).items()}
    for name in without:
        state[name].requires_grad_(False)
    inputs = any(name.startswith("input ") for name in changed)
    leaves = {id(v): _leaf(v, copied=inputs) for v in values if isinstance(v, Tensor)}
    given = [leaves.get(id(value), value) for value in values]
    if inputs:  # a tensor that is changed in place must not be a leaf
        given = [v + 0 if isinstance(v, Tensor) and v.requires_grad else v for v in given]
    # both forwards draw the same random numbers, and then the same output gradients; if one of them draws a different
    # number of times, that shows as a difference
    torch.manual_seed(0)
    off = tuple((kind, False, dtype) for kind, _, dtype in autocast_now())
    with autocast_again(off), InFloat64():  # type: ignore[no-untyped-call]
        if own:
            found = functional_call(block, dict(state), *tree_unflatten(given, spec))
        else:
            found = lowered.forward(*state.values(), *(v for v in given if isinstance(v, Tensor)))
        results = [r for r in tree_leaves(found) if isinstance(r, Tensor)]
        wanted = {repr(n): t for n, t in state.items() if t.requires_grad}
        wanted |= {f"argument {k}": t for k, t in enumerate(leaves.values()) if t.requires_grad}
        made = outcome({f"result {k}": r for k, r in enumerate(results)}, wanted)
    return made | {f"buffer {name!r}": state[name].detach() for name, _ in block.named_buffers()}


def _leaf(tensor: Tensor, *, copied: bool) -> Tensor:
    found: Tensor = widened(tensor.detach())
    found = found.clone() if copied else found
    return found.requires_grad_(tensor.requires_grad and torch.is_grad_enabled())
