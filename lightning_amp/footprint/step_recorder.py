"""Record every storage of a training step: its module and operator, and when it is created and released.

A storage that an operator makes belongs to the module whose forward is running. In the backward pass, the sequence
number of the running autograd node gives that module, because autograd numbers nodes in the order of the forward pass.
A node that a backward pass creates, as in blocks that run in chunks, belongs to the module of the node that creates it.

The limits of LiveBytes apply. An operator of a module that is not a submodule of the profiled one belongs to the
submodule that called it.
"""

from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lightning_amp._torch import autograd_node, autograd_order
from lightning_amp.data.batch import parts_in, tensors_in
from lightning_amp.footprint.host_state import on_device
from lightning_amp.footprint.live_bytes import LiveBytes, Read, RepeatedResult, storages_of, tensors_of, tensors_written
from lightning_amp.footprint.module_profile import (
    ACTIVATIONS,
    BACKWARD,
    BATCH,
    FAKE,
    FORWARD,
    GRADIENTS,
    OPTIMISER,
    PARAMETERS,
    REDUCTION,
    STATE,
    Head,
    Life,
    Passed,
    alive_bytes,
)

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "linear")
"""Operators that a head may end with."""
ACCUMULATE = "torch::autograd::AccumulateGrad"
"""Name of the autograd node that accumulates a parameter's gradient; it has no position in the forward pass."""
COPIES = ("_to_copy",)
"""Operators whose result counts as a parameter if their input does: autocast multiplies with copies of weights."""
SCORES = ("nll_loss_forward", "nll_loss2d_forward", "argmax")
"""Operators by which cross-entropy with classes, and the choice of the largest, read scores of classes."""
_LOGS = "_log_softmax"
_NOTED = {*PRODUCTS, *COPIES, *SCORES, "mul"}


class StepRecorder(LiveBytes):  # type: ignore[no-untyped-call]
    """Count live bytes, and record the origin of every storage.

    Attributes:
        lives: All storages so far.
        work: Phase and module of every operator so far.
        operators: Their names.
        head: The last product with a parameter in a forward pass.
        passed: Modules whose forward has returned outside of a backward pass, in order.
        optimising, reducing: Whether the optimizer is updating parameters, or gradients are reduced over ranks.
        in_step: Whether `training_step` is running, and no backward pass of the Trainer or of `manual_backward`.
        factors: Last two dims of the second factors of products in forward passes, the smaller one first.
        scored: Dims of tensors that cross-entropy, or the choice of the largest, reads in forward passes.
        trained: Parameters by name.
        lengths: Lengths of the first dimensions of the tensors in the last batch.
        returned: Storages of the last result of `training_step`.
        went_back: Modules that a backward pass started by `training_step` itself has passed through.
        differentiated: Those of them whose backward pass is recorded for a second derivative (`create_graph=True`).
        stepped: Optimizers that have stepped, by id.
        written: Parameters that are changed before the optimizer's step, and "batch" if the batch is.
        first_bytes, left_bytes: As in ModuleProfile; bytes of the step before.
        frees_gradients: Whether the last step's gradients are freed before `training_step`.
        drew: Whether random numbers were drawn that may decide what runs.
        batch_reads, own_reads, foreseen, makes, measured, noted: As `reads`, `foreseen`, ... in ModuleProfile.

    Args:
        module: Module whose submodules own the storages.
        device_type: As in LiveBytes.
    """

    def __init__(self, module: nn.Module, *, device_type: str | None = None) -> None:
        super().__init__(device_type=device_type)
        self.lives: list[Life] = []
        # operator 0 stands for all storages from before the step
        self.work: list[tuple[str, str]] = [(FORWARD, "")]
        self.operators = ["before the step"]
        self.head: Head | None = None
        self.factors: set[tuple[int, int]] = set()
        self.scored: set[int] = set()
        self.passed: list[Passed] = []
        self.optimising = self.reducing = self.in_step = self.frees_gradients = False
        self.lengths: frozenset[int] = frozenset()
        self.returned: list[Life] = []
        self.went_back: set[str] = set()
        self.differentiated: set[str] = set()
        self.stepped: set[int] = set()
        self.written: set[str] = set()
        self.first_bytes = self.left_bytes = 0
        self.batch_reads: Any = None
        self.own_reads: tuple[str, ...] = ()
        self.drew = False
        self.foreseen: tuple[str, ...] = ()
        self.makes: Any = None
        self.measured, self.noted = FAKE, False
        self._module = module
        self.trained: dict[str, nn.Parameter] = {}
        self._running: list[tuple[str, bool]] = []
        self._orders: list[int] = [-1]
        self._owners: list[tuple[str, int]] = [("", -1)]
        self._of_key: dict[int, Life] = {}
        self._of_slot: dict[int, Life] = {}
        self._weights: set[int] = set()
        self._now = Life()
        self._hooks: list[Any] = []
        self._node: Any = None

    def start(self, batch: Any, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Start recording a step, including the storages that exist already."""
        optimizers = list(optimizers)
        # only now: hooks of the module may create submodules
        self._names = {id(child): fqn for fqn, child in self._module.named_modules()}
        self.trained = dict(self._module.named_parameters())
        self._parameters = {id(parameter): name for name, parameter in self.trained.items()}
        self._hold([*self.trained.items(), *self._module.named_buffers()], PARAMETERS)
        self.hold_gradients()
        self.hold_state(optimizers)
        self._hold([(BATCH, tensor) for tensor in tensors_in(batch)], ACTIVATIONS)
        self._hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
            *(optimizer.register_step_pre_hook(self._before_update) for optimizer in optimizers),
            *(optimizer.register_step_post_hook(self._after_update) for optimizer in optimizers),
        ]
        self.__enter__()

    def stop(self) -> None:
        """Stop recording."""
        self.__exit__(None, None, None)
        for hook in self._hooks:
            hook.remove()

    @property
    def most_bytes(self) -> int:
        """Most bytes of the recorded step, with what was foreseen, or of the first one."""
        return max(self.first_bytes, int(alive_bytes(self.lives, len(self.work)).max()))

    def inherit(self, before: LiveBytes) -> None:
        """Count what earlier steps have made and kept, as tensors of an earlier batch; not its batch itself."""
        lives = before._of_key if isinstance(before, StepRecorder) else {}
        for key, storage in before.alive():
            life = lives.get(key) or Life("kept", "", ACTIVATIONS, (storage.nbytes(),), "uint8")
            if key not in self._alive and life.name != BATCH:
                self._now = Life(life.name, life.fqn, ACTIVATIONS, life.shape, life.dtype)
                self._take(key, storage)

    def begin_step(self, batch: Any) -> None:
        """Note that `training_step` starts; it may run inside the optimizer's step."""
        self.optimising, self.in_step = False, True
        tensors = (part for part in parts_in(batch) if isinstance(part, Tensor) and part.dim())
        self.lengths = frozenset(tensor.shape[0] for tensor in tensors)

    def end_step(self, returned: Any) -> None:
        """Note that `training_step` has returned or raised."""
        self.in_step = False
        keys = {id(storage) for _, storage in storages_of(tensors_in(returned))}
        self.returned = [self._of_key[key] for key in keys if key in self._of_key]

    def begin_optimiser(self) -> None:
        """Note that gradients are complete, and that the optimizer runs until its step ends."""
        self.hold_gradients()
        self.optimising = True
        for name, parameter in self.trained.items():
            # `parameter.data = ...` calls no operator
            life = None if hasattr(parameter, "__tensor_flatten__") else self._life_of(parameter)
            if life is not None and life.kind != PARAMETERS:
                self.written.add(name)

    def add_update(self, n_bytes: int) -> None:
        """Add bytes that an update of parameters takes for a moment, after the step as it was recorded."""
        if self.work[-1][0] != OPTIMISER:
            self.work.append((OPTIMISER, ""))
            self.operators.append("update")
        last = len(self.work) - 1
        self.lives.append(Life("an update of parameters", "", n_bytes=n_bytes, birth=last, death=last))

    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.stepped.add(id(optimizer))
        # a closure runs forward and backward first; args[0] is the optimizer, args[1] the closure
        if len(args) < 2 and kwargs.get("closure") is None:
            self.begin_optimiser()

    def _after_update(self, *_: Any) -> None:
        self.optimising = False

    def hold_gradients(self) -> None:
        """Record the current gradients of parameters as gradients, from their creation on."""
        # during a step, parameters may be replaced by tensors that have no gradient
        now = {
            name: self.trained.get(name, p) if hasattr(p, "__tensor_flatten__") else p
            for name, p in self._module.named_parameters()
        }
        found = [(f"{name}.grad", p.grad) for name, p in now.items() if p.grad is not None]
        self._hold(found, GRADIENTS)

    def hold_state(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Record what optimizers keep on the device as their state."""
        for optimizer in on_device(optimizers):
            for parameter, state in optimizer.state.items():
                name = self._parameters.get(id(parameter), "")
                named = state.items() if isinstance(state, dict) else [("", state)]
                self._hold([(f"{name}.{key}", v) for key, value in named for v in tensors_of(value)], STATE)

    def _hold(self, named: Iterable[tuple[str, Tensor]], kind: str) -> None:
        for name, tensor in named:
            fqn = name.rpartition(".")[0] if kind == PARAMETERS else self._owner_of(name)
            self._now = Life(name, fqn, kind)
            self.watch(tensor)
            for _, storage in storages_of([tensor]):
                life = self._of_key.get(id(storage))
                if life is not None and life.kind not in (PARAMETERS, STATE):
                    life.name, life.fqn, life.kind = name, fqn, kind

    def _owner_of(self, name: str) -> str:
        """Return the module of a name such as "encoder.weight.grad" or "encoder.weight.exp_avg"."""
        return name.rpartition(".")[0].rpartition(".")[0]

    def begins(self, func: Any, args: Any, read: Read) -> None:
        """Record the module and phase of the operator that runs now."""
        self._node = node = autograd_node()
        outside = REDUCTION if self.reducing else OPTIMISER if self.optimising else FORWARD
        phase = outside if node is None else BACKWARD
        fqn, order = self._place(node)
        if self.in_step and node is not None:
            self.went_back.add(fqn)
            if torch.is_grad_enabled():
                self.differentiated.add(fqn)
        self.work.append((phase, fqn))
        self.operators.append(func._opname)
        name = f"backward of {node.name()}" if node is not None and not self._inside(node) else func._opname
        self._now = Life(name, fqn, birth=len(self.work) - 1, order=order)
        if node is not None and node.name() == ACCUMULATE and node.variable.grad is not None:
            # a tensor that is added to an existing gradient is a gradient too
            for tensor in tensors_of(args):
                life = self._life_of(tensor)
                if life is not None and not life.kind:
                    life.name, life.kind = f"{self._parameters.get(id(node.variable), '')}.grad", GRADIENTS

    def ends(self, func: Any, args: Any, kwargs: Any, read: Read, result: Any) -> None:
        """Record a product with a parameter as the head, a copy of a parameter as a weight, and what is written to."""
        if func._schema.is_mutable and self.work[self._now.birth][0] != OPTIMISER:
            for tensor in tensors_written(func, args, kwargs):
                life = self._life_of(tensor)
                if life is not None and (life.kind == PARAMETERS or life.name == BATCH):
                    self.written.add(life.name)
        if func._opname not in _NOTED or self.work[self._now.birth][0] != FORWARD:
            return
        if func._opname in SCORES or func._opname == "mul":
            lives = (self._of_key.get(id(storage)) for _, storage in read)
            # cross-entropy with probabilities multiplies them with logarithms
            logs = (life.shape for life in lives if life is not None and life.name == _LOGS)
            self.scored.update(*logs, *(tensor.shape for tensor, _ in read if func._opname in SCORES))
            return
        if func._opname not in (*COPIES, "convolution"):
            # a bias is the first argument of all but `linear`
            second = read[1 if func._opname == "linear" else -1][0]
            # a sparse factor is read by its parts, of which the values have one dim
            if second.dim() > 1:
                smaller, larger = sorted(second.shape[-2:])
                self.factors.add((smaller, larger))
        given = (self._of_key.get(id(storage)) for _, storage in read)
        if not any(life is not None and (life.kind == PARAMETERS or id(life) in self._weights) for life in given):
            return
        if func._opname not in COPIES:
            self.head = Head(self._now.order, tuple(result.shape))
        elif (made := self._life_of(result)) is not None:
            self._weights.add(id(made))

    def _life_of(self, tensor: Tensor) -> Life | None:
        return self._of_key.get(id(tensor.untyped_storage())) if tensor.layout is torch.strided else None

    def _inside(self, node: Any) -> bool:
        """Whether a module's forward is running that started in this phase; in a backward pass, a recomputation."""
        return bool(self._running) and self._running[-1][1] == (node is not None)

    def _place(self, node: Any) -> tuple[str, int]:
        """Return the module that is running, and the position of its operator in the forward pass."""
        if node is None or self._inside(node):
            fqn = self._running[-1][0] if self._running else ""
            if self._owners[-1][1] >= 0:
                # the backward pass has ended; this operator's node has its number already
                self._mark(fqn, made=1)
            return fqn, autograd_order()
        if node.name() == ACCUMULATE:
            name = self._parameters.get(id(node.variable))
            return self._owners[-1][0] if name is None else self._owner_of(f"{name}.grad"), -1
        order = node._sequence_nr()
        # marks are sorted by autograd's numbers: the last mark at or before the node's number gives its module
        fqn, made_by = self._owners[bisect_right(self._orders, order) - 1]
        order = made_by if made_by >= 0 else order
        self._mark(fqn, order)
        return fqn, order

    def _enter(self, module: nn.Module, _: Any) -> None:
        above = self._running[-1][0] if self._running else ""
        self._running.append((self._names.get(id(module), above), autograd_node() is not None))
        self._mark(self._running[-1][0])

    def _leave(self, *_: Any) -> None:
        fqn, in_backward = self._running.pop()
        if not in_backward:
            self.passed.append(Passed(fqn, len(self.work) - 1, self.current))
        self._mark(self._running[-1][0] if self._running else "")

    def _mark(self, fqn: str, order: int = -1, *, made: int = 0) -> None:
        """Assign new nodes, and the last `made` ones, to a module; in a backward pass, node `order` creates them."""
        if self._owners[-1] != (fqn, order):
            # `_place` bisects the numbers, which must not decrease: `made` never sets a mark back beyond the one before
            # it
            self._orders.append(max(self._orders[-1], autograd_order() - made))
            self._owners.append((fqn, order))

    def _appears(self, result: RepeatedResult) -> None:
        now, dtype = self._now, str(result.dtype).removeprefix("torch.")
        life = Life(now.name, now.fqn, now.kind, result.shape, dtype, result.n_bytes, now.birth, now.order)
        self.lives.append(life)
        self._of_slot[result.slot] = life

    def _passes(self, slot: int) -> None:
        self._of_slot.pop(slot).death = len(self.work) - 1

    def _born(self, key: int, n_bytes: int, tensor: Tensor | None) -> None:
        now = self._now
        life = Life(now.name, now.fqn, now.kind, now.shape, now.dtype, n_bytes, now.birth, now.order)
        if tensor is None:
            life.name = life.name if life.shape else "resize_"
        else:
            life.shape, life.dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        self.lives.append(life)
        self._of_key[key] = life

    def _resized(self, key: int, n_bytes: int) -> None:
        was = self._of_key[key]
        # a Life has one size, so that bytes over time follow from births and deaths alone
        self._died(key)
        self._born(key, n_bytes, None)
        life = self._of_key[key]
        life.name, life.fqn, life.kind = was.name, was.fqn, was.kind

    def _died(self, key: int) -> None:
        self._of_key.pop(key).death = len(self.work) - 1
