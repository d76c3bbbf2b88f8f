"""Install activation checkpointing: a block keeps only its inputs, and its forward runs again in the backward pass.

Exact: the same computation runs twice (torch.utils.checkpoint, non-reentrant), with the same random numbers, precision,
mode and state of everything that the block reads (recompute_state.py). Changes of buffers, attributes and logs by a
forward pass happen once, and batch statistics are exchanged between ranks once (ranks/received.py). The activations
that the block keeps shrink to its inputs. The cost is a second forward pass, up to the last tensor that the backward
pass needs.

A stratum of a decoder is such a block: the activations of K strata shrink to those of one, and v. If the loss is
computed inside the strata, `stream` keeps as little and computes everything once.

A block that cannot be computed twice exactly raises an error, at installation or in its first forward pass. After the
first recomputation of a block, its results are compared with those of the first pass.

Without gradients, as in validation, the block runs unchanged.
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
from lightning_amp.footprint.run_again.recompute_state import FirstPass, Place, digests, same_digests, unrepeatable
from lightning_amp.techniques.checks.decoder import walk_of
from lightning_amp.techniques.contract.change import Change
from lightning_amp.techniques.contract.protocol import DecomposedDecoder
from lightning_amp.techniques.ranks.received import first_pass, second_pass
from lightning_amp.techniques.recompute.row import RecomputeBlock, RecomputeStrata


def refusal(module: nn.Module, step: CountedStep, *, values: bool) -> str:
    """Return why no block of a counted step can run again; "" if blocks can."""
    return step.no_second_pass


def recompute_block(module: nn.Module, spec: RecomputeBlock, mesh: object) -> Change:
    """Install recomputation on a block.

    Raises:
        InstallError: The block has something that cannot run twice.
    """
    reason = unrepeatable(module)
    if reason:
        raise InstallError(_refusal(type(module).__name__, reason))
    return Change({}, forwards={"": RecomputedForward()})


def recompute_strata(decoder: DecomposedDecoder, spec: RecomputeStrata, mesh: object) -> Change:
    """Install recomputation on each stratum of a decoder.

    Raises:
        InstallError: The strata do not run in a loop, or have something that cannot run twice.
    """
    walk_of(decoder, "recompute", once=True)
    for k, stratum in enumerate(decoder.strata):
        if reason := unrepeatable(stratum):
            raise InstallError(_refusal(f"stratum {k} ({type(stratum).__name__})", reason))
    return Change({}, forwards={f"strata.{k}": RecomputedForward() for k in range(len(decoder.strata))})


@dataclass
class RecomputedForward:
    """Override that runs a block's forward twice; made by `recompute_block` and `recompute_strata`.

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
        """Set the block's name."""
        self.fqn = fqn

    def __call__(self, forward: Callable[..., Any], block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return the result of `forward` for the block.

        Raises:
            InstallError: The block changes state that cannot be restored before its second pass.
        """
        if not torch.is_grad_enabled():
            return forward(block, *args, **kwargs)
        name = f"{self.fqn or 'a block'} ({type(block).__name__})"
        first = FirstPass(block, (args, kwargs), self.changing)
        trained = [(parameter, parameter.requires_grad) for parameter in block.parameters()]
        # nothing else holds the arguments after the first pass: what checkpoint saves of them may leave
        passes, compare = [(args, kwargs)], not self.compared
        expected: list[Any] = []
        received = list[Any]()

        def run(*leaves: Any) -> Any:
            # the first call is the forward pass; `checkpoint` makes later ones in the backward pass
            if passes:
                own_args, own_kwargs = passes.pop()
                with first_pass(received):
                    return forward(block, *own_args, **own_kwargs)
            # the caller may have changed its lists and dictionaries since
            given_args, given_kwargs = tree_unflatten(list(leaves), first.containers)
            # if results are compared, objects may change in parts that the block does not read: in the first step,
            # classifiers of HuggingFace write the kind of their loss into the config that all blocks share
            # (on devices other than the CPU, a difference within ROUNDING cannot be distinguished from that of kernels)
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

        # the complete result is compared, so the second pass must not stop early at the last saved tensor
        result = checkpoint(run, *first.arguments, use_reentrant=False, early_stop=not compare)
        reason = first.settle()
        if reason:
            raise InstallError(_refusal(name, reason))
        first.let_go()
        if compare:
            expected.append(digests(result))
        return result

    def _compare(self, name: str, expected: Sequence[Any], found: Sequence[Any]) -> None:
        """Raise InstallError if the second pass gives other results, for a reason that no check has detected."""
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
    """Context that restores requires_grad of parameters as in the first pass: frozen parameters save fewer tensors."""
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
