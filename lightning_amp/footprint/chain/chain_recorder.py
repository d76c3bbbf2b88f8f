"""Record which block keeps each storage of a counted step and until when, for every choice of recomputed blocks.

Tensors that autograd saves are released at once and only recorded. A storage then lives as long as Python holds it, and
the record says which block keeps it for the backward pass and until when. A backward pass on fake tensors needs no
values, and receives new tensors of the same shape. A step with values must keep the tensors; there, a storage counts as
held by Python until its last read by an operator of a forward pass.
"""

import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_amp._torch import (
    FakeTensor,
    autograd_node,
    autograd_order,
    disable_torch_function,
    in_transform,
    parts_of,
    tree_leaves,
)
from lightning_amp.data.batch import integers_in
from lightning_amp.footprint.chain.block_call import BlockCall
from lightning_amp.footprint.chain.module_names import all_names, copied_blocks, modules_of
from lightning_amp.footprint.find_blocks import find_blocks
from lightning_amp.footprint.live_bytes import Read, moved_bytes, storages_of, tensors_of
from lightning_amp.footprint.module_profile import FORWARD, GRADIENTS, PARAMETERS, STATE, Life
from lightning_amp.footprint.operator_rates import OperatorRates, times_now
from lightning_amp.footprint.run_again.recompute_state import FirstPass, unrepeatable
from lightning_amp.footprint.step_recorder import StepRecorder
from lightning_amp.random_streams import drawn_between, drawn_from, host_streams

VALUES = ("_local_scalar_dense", "is_nonzero")
"""Operators that return a value to Python."""


@dataclass(slots=True)
class Use:
    """A storage that autograd keeps.

    Attributes:
        life: The storage.
        call: Index of the block call in whose forward pass it is saved; None outside of blocks.
        start: Operator after which it is saved.
        read: Operator before which a backward pass first reads it; None if none does.
        end: Operator after which it is released; None at the end of the step.
        order: Autograd's number of the node that reads it; -1 if none does.
    """

    life: Life
    call: int | None
    start: int
    read: int | None = None
    end: int | None = None
    order: int = -1


@dataclass(slots=True)
class RecordedCall:
    """A forward pass of a block: operators [start, end], and autograd numbers [first_order, last_order).

    `output_bytes` are those of its results, `strided_bytes` those of them that are not contiguous. `last_kept` is the
    last operator after which autograd saves a tensor, and `asks` that before which a backward pass first reads one:
    a second forward pass stops and begins there. Parameters count, although they are in memory anyway.
    """

    fqn: str
    start: int
    given: BlockCall
    end: int = 0
    last_kept: int = -1
    asks: int | None = None
    first_order: int = 0
    last_order: int = 0
    seconds: float = 0.0
    inputs: list[Life] = field(default_factory=list)
    outputs: list[Life] = field(default_factory=list)
    output_bytes: int = 0
    strided_bytes: int = 0
    fixed: str = ""


@dataclass(eq=False, slots=True, weakref_slot=True)
class _KeptTensor:
    """Object that autograd gets in place of a saved tensor."""

    use: Use | None
    call: RecordedCall | None
    make: Callable[[], Tensor]


class ChainRecorder(StepRecorder):  # type: ignore[no-untyped-call]
    """StepRecorder that also records block calls and the tensors that autograd saves.

    Attributes:
        calls: Calls of blocks with gradients, in order.
        walks: For each training step, the blocks that its forward pass called, with gradients or without, in order.
        uses: Storages that autograd has saved.
        orders: Position in the forward pass of every operator in `work`.
        took: Seconds of every operator in `work`, if operators run one after the other.
        read_last: Last operator of a forward pass that read a storage, by the id of its Life.
        readers: Operators of forward passes that read a parameter, by its name.
        computed: Ids of the Lives that depend on parameters; all others depend on the batch alone.
        of_blocks: Ids of the Lives that blocks of `stages` have made, or that depend on results of these.
        reads, writes: Operators of forward passes that read, and wrote, each Life not in `of_blocks`, by its id.
        integers: Bytes of the batch's tensors of integers, of which every call of a pipelined step gets a copy, by the
            id of their Life.
        drawn: Ids of the Lives that depend on random numbers.
        decides: Whether random numbers were drawn that may decide which blocks run: numbers of Python or NumPy, or
            those of torch whose value was read.
        transformed: Blocks that torch.func has transformed (vmap, grad, jvp or others); their calls are not recorded.
        swapped: Blocks that torch.func.functional_call called with replaced parameters.
        copied: Blocks of which the step has made a copy (copy.deepcopy); it has a copy of the block's `forward`.
        names_of_parameters: All names of each parameter, by the first of them.
        read_beside: Parameters of blocks that forward passes read outside of calls of their block, with the block.

    Args:
        module: Module whose step is counted.
        rates: Rates that give the time of a block.
        stages: Names of the blocks that could be pipeline stages.
        watches_saved: Whether to record block calls and saved tensors, which torch.func.grad does not support.
    """

    # the time of an operator depends on its arguments
    counts_repeated = False

    def __init__(
        self, module: nn.Module, rates: OperatorRates, stages: Collection[str] = (), *, watches_saved: bool = True
    ) -> None:
        super().__init__(module)
        self.calls: list[RecordedCall] = []
        self.walks: list[list[str]] = []
        self.uses: list[Use] = []
        self.orders: list[int] = [-1]
        self.took: list[float] = [0.0]
        self.launch_seconds = 0.0
        self.read_last: dict[int, int] = {}
        self.readers: dict[str, list[int]] = {}
        self.computed: set[int] = set()
        self.of_blocks: set[int] = set()
        self.reads: dict[int, list[int]] = {}
        self.writes: dict[int, list[int]] = {}
        self.integers: dict[int, int] = {}
        self.drawn: set[int] = set()
        self.decides = False
        self.transformed: set[str] = set()
        self.swapped: set[str] = set()
        self.copied: set[str] = set()
        self._rates, self._stages, self.watches_saved = rates, frozenset(stages), watches_saved
        self.read_beside: dict[str, str] = {}
        self.names_of_parameters: dict[str, list[str]] = {}
        self._modules_before: dict[int, nn.Module] = {}
        self._open: int | None = None
        self._aside = False
        self._given: list[Life] = []
        self._generators: set[torch.Generator] = set()
        self._saved = saved_tensors_hooks(self._keep, self._give)

    def __deepcopy__(self, _: dict[int, Any]) -> "ChainRecorder":
        """Return itself: a step that copies blocks, whose `forward` refers to the recorder, must not copy records."""
        return self

    def records_calls_of(self, names: Collection[str]) -> bool:
        """Whether `walks` has every call of these blocks."""
        return self._blocks.keys() >= {*names}

    @property
    def read_outside(self) -> frozenset[str]:
        """Blocks whose parameters the forward pass reads outside of their calls, as code that calls submodules of a
        block does.
        """
        return frozenset(self.read_beside.values()) - self.transformed if self.watches_saved else frozenset()

    @property
    def whole_lives(self) -> list[Life]:
        """All storages, with the releases of a normal step, in which autograd keeps what it saves."""
        ends: dict[int, int | None] = {}
        for use in self.uses:
            before = ends.get(id(use.life), use.life.death)
            ends[id(use.life)] = None if before is None or use.end is None else max(before, use.end)
        return [replace(life, death=ends.get(id(life), life.death)) for life in self.lives]

    def start(self, batch: Any, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Start recording a step, including the storages that exist already."""
        super().start(batch, optimizers)
        self.integers = {id(self._life_of(tensor)): tensor.nbytes for tensor in integers_in(batch)}
        # the first step is not recorded
        self.walks, self._replaced, self._blocks = [], {}, find_blocks(self._module)
        self.copied.update(copied_blocks(self._module, self._blocks, self._modules_before))
        for fqn, block in self._blocks.items():
            # before `forward` is set on the instance below, which is itself a reason why a block cannot run twice
            reason = unrepeatable(block)
            self._replaced[fqn] = block
            block.forward = partial(self._call, fqn, reason, block, block.forward)
        self.names_of_parameters = all_names(self._module)
        self._random_state, self._own = host_streams(), {*map(id, self._module.parameters())}
        if self.watches_saved:
            self._saved.__enter__()

    def stop(self) -> None:
        """Stop recording."""
        self.decides |= bool(drawn_between(self._random_state, host_streams()))
        if self.watches_saved:
            self._saved.__exit__()
        for block in self._replaced.values():
            vars(block).pop("forward", None)
        super().stop()

    def _call(self, fqn: str, fixed: str, block: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Record a forward pass of a block; a call inside a backward pass is a recomputation, and is ignored."""
        if block is not self._blocks[fqn]:
            self.copied.add(fqn)
        # torch.func.functional_call replaces parameters by other tensors while it calls a module
        elif not self._own.issuperset(map(id, block.parameters())):
            self.swapped.add(fqn)
        if in_transform():
            self.transformed.add(fqn)
            return forward(*args, **kwargs)
        # a block within a block belongs to the outer one: nested calls would count operators twice
        again = autograd_node() is not None or self._open is not None
        if not again and block is self._blocks[fqn] and self.walks:
            self.walks[-1].append(fqn)
        if again or not self.watches_saved or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        given = BlockCall.of(fqn, args, kwargs)
        start = len(self.work)
        call = RecordedCall(fqn, start, given, fixed=fixed, last_kept=start - 1, first_order=autograd_order())
        call.inputs = self._lives_of(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        # copies that are made to detect changes are not part of the step
        self._aside = True
        first = FirstPass(block, (args, kwargs), {})
        self._aside = False
        self._open, self._generators = len(self.calls), set()
        self.calls.append(call)
        try:
            result = forward(*args, **kwargs)
        finally:
            self._open = None
        call.end, call.last_order = len(self.work) - 1, autograd_order()
        with drawn_from(self._generators):
            call.fixed = call.fixed or first.settle()
        results = list(tensors_of(tree_leaves(result)))
        call.outputs = self._lives_of(results)
        with disable_torch_function():
            # for a wrapper subclass, the bytes of its shards
            parts = [part for tensor in results for part in parts_of(tensor)]
            call.output_bytes = sum(part.nbytes for part in parts)
            call.strided_bytes = sum(part.nbytes for part in parts if not part.is_contiguous())
        return result

    def _lives_of(self, tensors: Iterable[Tensor]) -> list[Life]:
        # a subclass must not see that its storage is read: a product that `logits` has put off would be computed
        with disable_torch_function():
            return self._lives_in(storage for _, storage in storages_of(tensors))

    def _lives_in(self, storages: Iterable[torch.UntypedStorage]) -> list[Life]:
        found = (self._of_key.get(id(storage)) for storage in storages)
        return list({id(life): life for life in found if life is not None}.values())

    def begin_step(self, batch: Any) -> None:
        """Note that `training_step` starts."""
        super().begin_step(batch)
        self._modules_before = self._modules_before or modules_of(self._module)
        self.walks.append([])

    def dispatched(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator, and record it if it belongs to the step."""
        return func(*args, **kwargs) if self._aside else super().dispatched(func, types, args, kwargs)

    def add_update(self, n_bytes: int) -> None:
        """Add the bytes of an update of parameters, as an operator that takes no time."""
        super().add_update(n_bytes)
        self.orders += [-1] * (len(self.work) - len(self.orders))
        self.took += [0.0] * (len(self.work) - len(self.took))

    def begins(self, func: Any, args: Any, read: Read) -> None:
        """Record the storages that an operator reads."""
        super().begins(func, args, read)
        self._given = [] if self._node is not None else self._lives_in(storage for _, storage in read)
        for life in self._given:
            self.read_last[id(life)] = self._now.birth

    def ends(self, func: Any, args: Any, kwargs: Any, read: Read, result: Any) -> None:
        """Record an operator's time, and what its result depends on."""
        super().ends(func, args, kwargs, read, result)
        made = tensors_of(result)
        # an operator that raised an error is in `work` too
        self.orders += [self._now.order] * (len(self.work) - len(self.orders))
        self.took += [0.0] * (len(self.work) - len(self.took))
        if isinstance(generator := kwargs.get("generator"), torch.Generator):
            self._generators.add(generator)
        moved = moved_bytes(read, made)
        self.took[-1] = times_now() * self._rates.seconds(func, args, kwargs, result, moved)
        self.launch_seconds += times_now() * self._rates.overhead_seconds * (not func.is_view)
        if self._open is not None and self.work[-1][0] == FORWARD:
            self.calls[self._open].seconds += self.took[-1]
        if func._opname in VALUES:
            self.decides |= any(id(life) in self.drawn and id(life) not in self.computed for life in self._given)
        if self.work[-1][0] != FORWARD:
            return
        given, now = self._given, self._now.birth
        weights = [life.name for life in given if life.kind == PARAMETERS and life.name in self.trained]
        for name in weights:
            self.readers.setdefault(name, []).append(now)
            running = {fqn for fqn, _ in self._running}
            blocks = (fqn for fqn in self._blocks if name.startswith(f"{fqn}."))
            self.read_beside.update((name, fqn) for fqn in blocks if fqn not in running)
        results = {id(life) for life in self._lives_of(made)}
        ids = [id(life) for life in given]
        if weights or not self.computed.isdisjoint(ids):
            self.computed |= results
        of_stage = self._open is not None and self.calls[self._open].fqn in self._stages
        # a view shares the storage of its base: a stage that views a mask of the batch has not made it
        if not func.is_view and (of_stage or not self.of_blocks.isdisjoint(ids)):
            self.of_blocks |= results
        for places, lives in ((self.reads, ids), (self.writes, results)):
            for life in lives:
                if life not in self.of_blocks:
                    places.setdefault(life, []).append(now)
        if torch.Tag.nondeterministic_seeded in func.tags or not self.drawn.isdisjoint(ids):
            self.drawn |= results

    def _keep(self, tensor: Tensor) -> _KeptTensor:
        """Record that autograd saves a tensor, and return the object that it keeps."""
        life, now = self._life_of(tensor), len(self.work) - 1
        # a tensor that is saved in a backward pass belongs to a new graph, not to the forward pass of a block
        use, number = None, None if autograd_node() is not None else self._open
        call = None if number is None else self.calls[number]
        if call is not None:
            call.last_kept = now
        if life is not None and life.kind not in (PARAMETERS, GRADIENTS, STATE):
            use = Use(life, number, now)
            self.uses.append(use)
        if use is None or not isinstance(tensor, FakeTensor):
            # an alias: a node that holds its own result would form a reference cycle, and neither would be freed
            self._aside = True
            alias = tensor.detach()
            self._aside = False
            kept = _KeptTensor(use, call, lambda: alias)
        else:
            # not a closure over the tensor, which would keep it alive
            layout = tuple(tensor.shape), tensor.stride()
            empty = partial(torch.empty_strided, *layout, dtype=tensor.dtype, device=tensor.device)
            kept = _KeptTensor(use, call, empty)
        if use is not None:
            # autograd drops the packed object when it frees a node's saved tensors, which is the end of the use
            weakref.finalize(kept, self._let_go, use)
        return kept

    def _let_go(self, use: Use) -> None:
        use.end = len(self.work) - 1

    def _give(self, kept: _KeptTensor) -> Tensor:
        """Return a saved tensor to a backward pass, which may hold it for longer than the graph, as a gradient."""
        self._aside = True
        try:
            given = kept.make()
        finally:
            self._aside = False
        if kept.call is not None and kept.call.asks is None and self._open is None:
            kept.call.asks = len(self.work)
        if kept.use is not None:
            if kept.use.read is None:
                kept.use.read, node = len(self.work), autograd_node()
                kept.use.order = -1 if node is None else node._sequence_nr()
            if self._life_of(given) is None:  # replaces a released tensor
                # `_let_go` runs for the packed object and for this tensor; the later call sets the end
                weakref.finalize(given.untyped_storage(), self._let_go, kept.use)
        return given
