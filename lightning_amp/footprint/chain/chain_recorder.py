"""A counted step from which every choice of recomputed blocks follows: who keeps each storage, and until when.

What autograd saves is let go of at once and only written down: a storage then lives as long as Python holds it, and it
is known beside this which block keeps it for the backward pass, until when. A backward pass on fake tensors needs no
values, and gets new tensors of the same shape. A step with values has to keep them; there a storage counts as held by
Python until an operator of a forward pass reads it for the last time.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import flop_registry

from lightning_amp._torch import (
    FLASH_ATTENTION,
    FakeTensor,
    autograd_node,
    autograd_order,
    tree_leaves,
    tree_map,
)
from lightning_amp.footprint.chain.block_call import BlockCall, Like, likeness
from lightning_amp.footprint.find_blocks import find_blocks, owners
from lightning_amp.footprint.first_pass import FirstPass, unrepeatable
from lightning_amp.footprint.live_bytes import tensors_of
from lightning_amp.footprint.module_profile import GRADIENTS, PARAMETERS, STATE
from lightning_amp.footprint.standing_for import times_now
from lightning_amp.footprint.step_recorder import StepRecorder
from lightning_amp.footprint.summarize import FORWARD, Life

FLOPS = {
    # torch counts these of GPUs only
    **{on_cpu: flop_registry[on_cuda] for on_cpu, on_cuda in FLASH_ATTENTION.items()},
    **flop_registry,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorRates:
    """What an operator takes: as long as its products or the bytes that it reads and writes, and its overhead."""

    matmul_flops: float
    memory_bytes: float
    overhead_seconds: float


@dataclass(slots=True)
class Use:
    """A storage that autograd keeps.

    Attributes:
        life: The storage.
        call: Call of a block in whose forward pass it is kept, None outside of blocks.
        start: Operator after which it is kept.
        read: Operator before which a backward pass asks for it first; None where none does.
        end: Operator after which it is let go of; None at the end of the step.
    """

    life: Life
    call: int | None
    start: int
    read: int | None = None
    end: int | None = None


@dataclass(slots=True)
class Call:
    """A forward pass of a block: operators [start, end], and places [first_order, last_order) of autograd.

    What a module computes after its last block is a call too, of the module's name, after so many calls of blocks.
    """

    fqn: str
    start: int
    given: BlockCall
    end: int = 0
    first_order: int = 0
    last_order: int = 0
    seconds: float = 0.0
    inputs: list[Life] = field(default_factory=list)
    input_bytes: int = 0
    outputs: list[Life] = field(default_factory=list)
    output_bytes: int = 0
    parameter_bytes: int = 0
    fixed: str = ""
    result: Any = None
    after: int = 0


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Kept:
    """What autograd gets in place of a tensor that it saves."""

    use: Use | None
    make: Callable[[], Tensor]


class ChainRecorder(StepRecorder):  # type: ignore[no-untyped-call]
    """Counts a step as a StepRecorder does, with what autograd saves apart.

    Attributes:
        calls: Of blocks, in order.
        uses: What autograd has saved.
        orders: Place in the forward pass of every operator in `work`.
        took: Seconds of every operator in `work`, as if each waited for the one before.
        read_last: Last operator of a forward pass that has read a storage, by the id of its Life.
        readers: Operators of forward passes that have read a parameter, by its name.
        trained: Names of the parameters.
        computed: Ids of the Lives that were made from parameters, at whatever remove; others are of the batch alone.
        drawn: Ids of those that random numbers went into.

    Args:
        module: Whose step is counted.
        rates: For the time of a block.
    """

    def __init__(self, module: nn.Module, rates: OperatorRates) -> None:
        super().__init__(module)
        self.calls: list[Call] = []
        self.uses: list[Use] = []
        self.orders: list[int] = [-1]
        self.took: list[float] = [0.0]
        self.read_last: dict[int, int] = {}
        self.readers: dict[str, list[int]] = {}
        self.computed: set[int] = set()
        self.drawn: set[int] = set()
        self.trained = frozenset(self._parameters.values())
        self._rates = rates
        self._open: int | None = None
        self._aside = False
        self._within = False
        self._uses_before = 0
        self._saved = saved_tensors_hooks(self._keep, self._give)

    def __deepcopy__(self, _: dict[int, Any]) -> "ChainRecorder":
        """Itself: a step that copies blocks, whose forwards are the recorder's, copies none of what was recorded."""
        return self

    @property
    def seconds(self) -> float:
        """Of all operators."""
        return sum(self.took)

    @property
    def whole_lives(self) -> list[Life]:
        """Every storage with a death that autograd puts off: as in a step of which nothing is let go of early."""
        ends: dict[int, int | None] = {}
        for use in self.uses:
            ends[id(use.life)] = _later(ends.get(id(use.life), use.life.death), use.end)
        return [replace(life, death=ends.get(id(life), life.death)) for life in self.lives]

    def start(self, batch: Any, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Begin a step, with what is there already."""
        super().start(batch, optimizers)
        self._replaced = {}
        for fqn, block in find_blocks(self._module).items():
            reason = unrepeatable(block)
            self._replaced[fqn] = block
            block.forward = partial(self._call, fqn, reason, block, block.forward)
        for fqn, owner in owners(self._module).items():
            self._replaced[fqn] = owner
            owner.forward = partial(self._call_of_owner, fqn, owner.forward)
        self._saved.__enter__()

    def stop(self) -> None:
        """End the step."""
        self._saved.__exit__()
        for block in self._replaced.values():
            vars(block).pop("forward", None)
        super().stop()

    def _call(self, fqn: str, fixed: str, block: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """A forward pass of a block; one inside a backward pass is somebody's recomputation, and is not looked at."""
        if autograd_node() is not None or self._open is not None or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        given = BlockCall.of(fqn, args, kwargs)
        call = Call(fqn, len(self.work), given, fixed=fixed, first_order=autograd_order())
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        call.inputs, call.input_bytes = self._lives_of(tensors), sum(t.nbytes for t in tensors)
        call.parameter_bytes = sum(p.nbytes for p in block.parameters())
        self._aside = True
        first = FirstPass(block, (args, kwargs), {})
        self._aside = False
        self._open = len(self.calls)
        self.calls.append(call)
        try:
            result = forward(*args, **kwargs)
        finally:
            self._open = None
        call.end, call.last_order = len(self.work) - 1, autograd_order()
        call.fixed = call.fixed or first.settle()
        call.result, self._uses_before = likeness(result), len(self.uses)
        results = list(tensors_of(tree_leaves(result)))
        call.outputs, call.output_bytes = self._lives_of(results), sum(t.nbytes for t in results)
        return result

    def _call_of_owner(self, fqn: str, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """A forward pass of a module that holds blocks: what it computes after the last one is a call by itself."""
        if autograd_node() is not None or self._within or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        given, self._within, first = BlockCall.of(fqn, args, kwargs), True, len(self.calls)
        try:
            result = forward(*args, **kwargs)
        finally:
            self._within = False
        if len(self.calls) == first or self.calls[-1].end + 1 == len(self.work):
            return result
        last = self.calls[-1]
        before = tuple((call.fqn.removeprefix(f"{fqn}."), call.result) for call in self.calls[first:-1])
        call = Call(
            fqn,
            last.end + 1,
            replace(given, args=(given.args, given.kwargs, _apart(last.result)), kwargs={}, before=before),
            end=len(self.work) - 1,
            first_order=last.last_order,
            last_order=autograd_order(),
            seconds=sum(self.took[last.end + 1 :]),
            inputs=[*self._lives_of(tensors_of((args, kwargs))), *last.outputs],
            outputs=self._lives_of(tensors_of(tree_leaves(result))),
            fixed="it is what follows the blocks, which cannot be computed again by itself",
            after=len(before) + 1,
        )
        for use in self.uses[self._uses_before :]:
            use.call = len(self.calls) if use.call is None else use.call
        self.calls.append(call)
        return result

    def _lives_of(self, tensors: Iterable[Tensor]) -> list[Life]:
        found = (self._life_of(tensor) for tensor in tensors)
        return list({id(life): life for life in found if life is not None}.values())

    def _life_of(self, tensor: Tensor) -> Life | None:
        return self._of_key.get(id(tensor.untyped_storage())) if tensor.layout is torch.strided else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._aside:
            return func(*args, **(kwargs or {}))
        given = [] if autograd_node() is not None else self._lives_of(tensors_of((args, kwargs)))
        for life in given:
            self.read_last[id(life)] = len(self.work)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.orders += [self._now.order] * (len(self.work) - len(self.orders))
        self.took += [0.0] * (len(self.work) - len(self.took))
        if not func.is_view:
            self.took[-1] = seconds = times_now() * self._seconds(func, args, kwargs or {}, result)
            if self._open is not None and self.work[-1][0] == FORWARD:
                self.calls[self._open].seconds += seconds
        if self.work[-1][0] == FORWARD:
            self._note_reads(given, result, draws=torch.Tag.nondeterministic_seeded in func.tags)
        return result

    def _note_reads(self, given: Iterable[Life], result: Any, *, draws: bool) -> None:
        """Which parameters an operator of a forward pass has read, and what its result depends on."""
        weights = [life.name for life in given if life.kind == PARAMETERS and life.name in self.trained]
        for name in weights:
            self.readers.setdefault(name, []).append(len(self.work) - 1)
        made = {id(life) for life in self._lives_of(tensors_of(result))}
        if weights or any(id(life) in self.computed for life in given):
            self.computed |= made
        if draws or any(id(life) in self.drawn for life in given):
            self.drawn |= made

    def _seconds(self, func: Any, args: Any, kwargs: Any, result: Any) -> float:
        moved = sum(t.nbytes for t in tensors_of((args, kwargs, result)) if t.layout is torch.strided)
        count = FLOPS.get(func.overloadpacket)
        flops = 0 if count is None else count(*args, **kwargs, out_val=result)
        rates = self._rates
        return max(flops / rates.matmul_flops, moved / rates.memory_bytes) + rates.overhead_seconds

    def _keep(self, tensor: Tensor) -> _Kept:
        """Autograd saves a tensor."""
        life, now = self._life_of(tensor), len(self.work) - 1
        use = None
        if life is not None and life.kind not in (PARAMETERS, GRADIENTS, STATE):
            use = Use(life, None if autograd_node() is not None else self._open, now)
            self.uses.append(use)
        self._aside = True
        alias = tensor.detach()
        self._aside = False
        if use is None or not isinstance(tensor, FakeTensor):
            kept = _Kept(use, lambda: alias)
        else:
            kept = _Kept(use, partial(_empty, tuple(alias.shape), alias.stride(), alias.dtype, alias.device))
        if use is not None:
            weakref.finalize(kept, self._let_go, use)
        return kept

    def _let_go(self, use: Use) -> None:
        use.end = len(self.work) - 1

    def _give(self, kept: _Kept) -> Tensor:
        """A backward pass asks for it, and may hold what it gets for longer than the graph: as a gradient."""
        self._aside = True
        try:
            given = kept.make()
        finally:
            self._aside = False
        if kept.use is not None:
            kept.use.read = len(self.work) if kept.use.read is None else kept.use.read
            if self._life_of(given) is None:  # it stands for what was let go of
                weakref.finalize(given.untyped_storage(), self._let_go, kept.use)
        return given


def _later(death: int | None, other: int | None) -> int | None:
    return None if death is None or other is None else max(death, other)


def _apart(result: Any) -> Any:
    """What a block returns, as none of a module's arguments."""
    return tree_map(
        lambda leaf: replace(leaf, same=-1 - leaf.same) if isinstance(leaf, Like) else leaf, result
    )


def _empty(shape: Any, stride: Any, dtype: Any, device: Any) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)
