"""recompute: nothing of a block is kept for the backward pass but its inputs, and there its forward runs again.

Exact: the same computation twice (torch.utils.checkpoint, non-reentrant), with the same random numbers, precision and
mode, and with what the block reads as it was (recompute_state.py). What a forward pass does to buffers, attributes
and logs happens once, and batch statistics of all ranks are sent once (ranks/received.py). What shrinks: all that
the block keeps, to its inputs. The price: its forward pass a second time, up to the last tensor that the backward pass
needs.

A stratum of a decoder is such a block: all that K strata keep becomes what one keeps, and v. Where the loss is computed
inside of the strata, `stream` keeps as little and computes everything once.

A block that cannot be computed twice exactly is refused: when the technique is installed, or in its first forward pass.
After the first recomputation of a block its results are compared with those of the first pass.

Without gradients, as in validation, the block runs as it is.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_amp._torch import tree_unflatten
from lightning_amp.errors import InstallError
from lightning_amp.footprint.chain.chain_of import CountedStep
from lightning_amp.footprint.forward_overrides import Position
from lightning_amp.footprint.recompute_state import FirstPass, Place, digests, same_digests, unrepeatable
from lightning_amp.techniques.checks.decoder import walk_of
from lightning_amp.techniques.contract.change import Change
from lightning_amp.techniques.contract.protocol import DecomposedDecoder
from lightning_amp.techniques.ranks.received import first_pass, second_pass
from lightning_amp.techniques.recompute.row import RecomputeBlock, RecomputeStrata


def refusal(module: nn.Module, step: CountedStep, *, values: bool) -> str:
    """Why no block of a counted step can run again; "" where blocks can."""
    return step.no_second_pass


def recompute_block(module: nn.Module, spec: RecomputeBlock, mesh: object) -> Change:
    """Compute a block again in the backward pass.

    Raises:
        InstallError: The block has something that cannot run twice.
    """
    reason = unrepeatable(module)
    if reason:
        raise InstallError(_refusal(type(module).__name__, reason))
    return Change({}, forwards={"": RecomputedForward()})


def recompute_strata(decoder: DecomposedDecoder, spec: RecomputeStrata, mesh: object) -> Change:
    """Compute a decoder's strata again in the backward pass, each as a block.

    Raises:
        InstallError: They are not run by a loop over strata, or have something that cannot run twice.
    """
    walk_of(decoder, "recompute", once=True)
    for k, stratum in enumerate(decoder.strata):
        if reason := unrepeatable(stratum):
            raise InstallError(_refusal(f"stratum {k} ({type(stratum).__name__})", reason))
    return Change({}, forwards={f"strata.{k}": RecomputedForward() for k in range(len(decoder.strata))})


@dataclass
class RecomputedForward:
    """What runs a block's forward twice; made by `recompute_block` and `recompute_strata`.

    Attributes:
        fqn: Name of the block, for messages.
        changing: Buffers that the block changes, by its mode.
        compared: Whether a second pass has been compared with its first.
    """

    position = Position.TWICE
    fqn: str = ""
    changing: dict[Any, frozenset[Place]] = field(default_factory=dict)
    compared: bool = False

    def installed_at(self, fqn: str, plans: object) -> None:
        """Note the block's name."""
        self.fqn = fqn

    def __call__(self, forward: Callable[..., Any], block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """What `forward` returns of the block.

        Raises:
            InstallError: The block changes what cannot be put back before its second pass.
        """
        if not torch.is_grad_enabled():
            return forward(block, *args, **kwargs)
        name = f"{self.fqn or 'a block'} ({type(block).__name__})"
        first = FirstPass(block, (args, kwargs), self.changing)
        trained = [(parameter, parameter.requires_grad) for parameter in block.parameters()]
        passes, compare = iter(("first",)), not self.compared
        expected: list[Any] = []
        received = list[Any]()

        def run(*leaves: Any) -> Any:
            # the first call is the forward pass, any later one is made by `checkpoint` in the backward pass
            if next(passes, None):
                with first_pass(received):
                    return forward(block, *args, **kwargs)
            # the caller may have changed its lists and dictionaries meanwhile
            given_args, given_kwargs = tree_unflatten(list(leaves), first.containers)
            # where results are compared, an object may be another in what the block does not read: the first step of
            # HuggingFace's classifiers writes the kind of their loss into the config that all blocks hold
            # (on other devices than the CPU a difference within ROUNDING is not distinguished from one of kernels)
            stale = first.stale(objects=not compare)
            if stale:
                raise InstallError(
                    f"{name} cannot be computed again in the backward pass: {stale} has been changed in place since the"
                    " forward pass; change it after the backward pass, or leave the block, or recompute, out of"
                    " the plan"
                )
            with first.again(), second_pass(received), _requiring_grad_as_before(trained):
                found = forward(block, *given_args, **given_kwargs)
            if compare and expected:
                self._compare(name, expected.pop(), digests(found))
            return found

        # what is compared is the whole result, so the second pass must not end at the last tensor that was saved
        result = checkpoint(run, *first.arguments, use_reentrant=False, early_stop=not compare)
        reason = first.settle()
        if reason:
            raise InstallError(_refusal(name, reason))
        if compare:
            expected.append(digests(result))
        return result

    def _compare(self, name: str, expected: Sequence[Any], found: Sequence[Any]) -> None:
        """Refuse a block whose second pass is another function, for a reason that nobody has seen."""
        if not same_digests(expected, found):
            raise InstallError(
                _refusal(
                    name,
                    "its second pass gives other numbers than its first, so that it depends on something that"
                    " is neither an argument nor an attribute of it, such as a generator of random numbers",
                )
            )
        self.compared = True


@contextmanager
def _requiring_grad_as_before(before: Iterable[tuple[nn.Parameter, bool]]) -> Iterator[None]:
    """Let parameters require gradients as they did in the first pass, until the end: a frozen one would keep less."""
    changed = [parameter for parameter, needed in before if parameter.requires_grad != needed]
    for parameter in changed:
        parameter.requires_grad_(not parameter.requires_grad)
    try:
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(not parameter.requires_grad)


def _refusal(name: str, reason: str) -> str:
    return (
        f"recompute does not support {name}, which cannot be computed a second time exactly: {reason}; leave"
        " the block, or recompute, out of the plan, or change it"
    )
