"""Run an optimizer's step on the host, for a bucket of parameters at a time, with state that stays there.

Of a bucket, parameters and gradients are copied to a slot of host memory. The optimizer's own step runs on these
copies, with the options of their groups, and the new parameters are copied back. The slot is used again, so that the
host holds the state and a few slots. The step of the optimizer is called as before, with its hooks and its closure; it
finds no groups when all parameters have been updated.

On a GPU copies run on streams of their own, and one bucket is on its way while the host updates the one before. Its
gradients stay until the host has them. Copies back are waited for before the step ends.

Exact: the operators are those of the same step on a CPU, on tensors of the same strides. Parameters are read anew in
every step, so that other code may change them. Where the options name no kernels, a GPU's step takes torch's fused
ones, which round otherwise.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from lightning_amp._torch import after_step_first, has_no_values, unseen
from lightning_amp.errors import InstallError, ModelError
from lightning_amp.footprint.host_state import keep_on_host, update_on_host
from lightning_amp.footprint.live_bytes import has_storage, storages_of, tensors_of
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.host_memory.copies import HostCopies
from lightning_amp.techniques.host_optimizer.row import HostOptimizer, on_line
from lightning_amp.techniques.own_step import step_for, why_whole

LEAVE_OUT = "leave host_optimizer out (strategies=[...] without it)"


@dataclass(eq=False, slots=True)
class _Slot:
    """Host memory of a bucket; `last_read` is the event after the last copy from it."""

    memory: Tensor
    last_read: Any = None


@dataclass(frozen=True, eq=False, slots=True)
class _Sent:
    """A bucket on its way: its parameters with their copies, and what it holds on the device.

    Attributes:
        slot: None in a count, which has no values.
        done: Event after the copies to the host; None if they have ended.
    """

    optimizer: Optimizer
    pairs: list[tuple[Tensor, Tensor]]
    gradients: list[Tensor]
    slot: _Slot | None
    done: Any


class HostUpdates:
    """The steps of a module's optimizers on the host; `stop` ends them."""

    def __init__(self, spec: HostOptimizer) -> None:
        self._spec, self._copies = spec, HostCopies()
        self._optimizers, self._hooks = list[Optimizer](), list[Any]()
        self._sent, self._free, self._slots = deque[_Sent](), list[_Slot](), list[_Slot]()
        # groups of optimizers, while others stand in for them
        self._aside = dict[int, list[dict[str, Any]]]()
        self._arrivals = dict[torch.device, Any]()

    @property
    def n_bytes(self) -> int:
        """Bytes of host memory: states of the optimizers, and slots."""
        states = tensors_of([[*state.values()] for one in self._optimizers for state in one.state.values()])
        storages = {id(storage): storage.nbytes() for _, storage in storages_of(states)}
        return sum(storages.values()) + sum(slot.memory.nbytes for slot in self._slots)

    def of(self, module: LightningModule, optimizers: Iterable[Optimizer]) -> None:
        """Keep the state of optimizers on the host from now on.

        Raises:
            InstallError: The step of one cannot run there.
        """
        for optimizer in optimizers:
            if why := _refusal(module, optimizer):
                raise InstallError(f"host_optimizer is not possible: {why}")
            _to_host(optimizer.state)
            keep_on_host(optimizer, self.update)
            self._optimizers.append(optimizer)
            self._hooks += [
                optimizer.register_step_pre_hook(self._before),
                # hooks of others may look at the groups
                after_step_first(optimizer, self._after),
                optimizer.register_load_state_dict_pre_hook(self._before_loading),
                optimizer.register_load_state_dict_post_hook(self._after_loading),
            ]

    def stop(self) -> None:
        """Let the optimizers run their own steps again; state returns to the device only if there is another step."""
        for hook in self._hooks:
            hook.remove()
        for optimizer in self._optimizers:
            keep_on_host(optimizer, None)
            if any(p.device.type != "cpu" for p in optimizer.state):
                optimizer.register_step_pre_hook(_to_device)
        for held in (self._hooks, self._optimizers, self._sent, self._free, self._slots):
            held.clear()

    def update(self, optimizer: Optimizer, parameters: Mapping[int, Tensor]) -> None:
        """Update parameters that have gradients; the last bucket may still be on its way, until the step ends."""
        for bucket in self._buckets(parameters.values()):
            self._send(optimizer, bucket)
            if len(self._sent) == self._spec.slots:
                self._step()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Give the step a closure that updates all parameters, and leaves it none."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")

        def run() -> Any:
            loss = None if closure is None else closure()
            trained = (p for group in optimizer.param_groups for p in group["params"])
            self.update(optimizer, {id(p): p for p in trained if p.grad is not None})
            while self._sent:
                self._step()
            for device, done in self._arrivals.items():
                self._copies.wait(done, device)
            self._arrivals.clear()
            self._aside[id(optimizer)], optimizer.param_groups = optimizer.param_groups, []
            return loss

        return args[:1], {"closure": run}

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        optimizer.param_groups = self._aside.pop(id(optimizer))

    def _before_loading(self, optimizer: Optimizer, state: Any) -> None:
        """Let torch load state to where tensors without elements are, in the place of parameters."""
        self._aside[id(optimizer)] = groups = optimizer.param_groups
        optimizer.param_groups = [
            {**group, "params": [torch.empty(0, dtype=p.dtype, device="cpu") for p in group["params"]]}
            for group in groups
        ]

    def _after_loading(self, optimizer: Optimizer) -> None:
        before, state = self._aside.pop(id(optimizer)), optimizer.state
        optimizer.state = defaultdict(dict)
        for group, of in zip(optimizer.param_groups, before, strict=True):
            for stand_in, parameter in zip(group["params"], of["params"], strict=True):
                if stand_in in state:
                    optimizer.state[parameter] = state[stand_in]
            group["params"] = of["params"]

    def _buckets(self, parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
        """Yield parameters in lists that fit a slot."""
        bucket, n_bytes = list[Tensor](), 0
        for parameter in parameters:
            more = 2 * on_line(parameter.nbytes)
            if bucket and n_bytes + more > self._spec.slot_bytes:
                yield bucket
                bucket, n_bytes = [], 0
            bucket.append(parameter)
            n_bytes += more
        if bucket:
            yield bucket

    def _send(self, optimizer: Optimizer, bucket: list[Tensor]) -> None:
        """Copy parameters and their gradients to the host."""
        gradients = [p.grad for p in bucket if p.grad is not None]
        if not all(map(has_storage, (*gradients, *(p.detach() for p in bucket)))):
            raise ModelError(f"host_optimizer copies dense gradients only, and found another kind; {LEAVE_OUT}")
        if any(map(has_no_values, bucket)):
            self._sent.append(_Sent(optimizer, [], gradients, None, None))
            return
        device = bucket[0].device
        with unseen(), torch.no_grad():
            slot = self._free_slot(device)
            places = _Places(slot.memory)
            pairs = [(p.detach(), places.like(p)) for p in (*bucket, *gradients)]
            done = self._copies.start(pairs, device, "out", slot.last_read)
        copies = [copy for _, copy in pairs]
        for copy, grad in zip(copies[: len(bucket)], copies[len(bucket) :], strict=True):
            copy.grad = grad
        self._sent.append(_Sent(optimizer, list(zip(bucket, copies, strict=False)), gradients, slot, done))

    def _step(self) -> None:
        """Update the bucket that was sent first, and copy its parameters back."""
        one = self._sent.popleft()
        if one.slot is None:
            return
        if one.done is not None:
            one.done.synchronize()
        state, device = one.optimizer.state, one.pairs[0][0].device
        own = defaultdict(dict, {copy: state[p] for p, copy in one.pairs if p in state})
        with unseen():
            one.optimizer.state = own
            try:
                tensors = {id(p): copy for p, copy in one.pairs}
                step_for(one.optimizer, tensors, dict if device.type == "cpu" else _fused)
            finally:
                one.optimizer.state = state
            state.update((p, own[copy]) for p, copy in one.pairs if copy in own)
            with torch.no_grad():
                back = ((copy, p) for p, copy in one.pairs)
                one.slot.last_read = done = self._copies.start(back, device, "back")
        self._free.append(one.slot)
        if done is not None:
            self._arrivals[device] = done

    def _free_slot(self, device: torch.device) -> _Slot:
        if self._free:
            return self._free.pop(0)
        with torch.device("cpu"), torch.inference_mode(False):
            memory = torch.empty(self._spec.slot_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._slots.append(_Slot(memory))
        return self._slots[-1]


def updates_of(optimizer: Optimizer) -> HostUpdates | None:
    """Return what updates an optimizer's parameters; None if its state is on the device."""
    found = getattr(update_on_host(optimizer), "__self__", None)
    return found if isinstance(found, HostUpdates) else None


class _Places:
    """Places in a slot, one after the other."""

    def __init__(self, memory: Tensor) -> None:
        self._memory, self._end = memory, 0

    def like(self, x: Tensor) -> Tensor:
        """Return a tensor without values of the same shape, type and, if it has no gaps, strides."""
        there = torch.empty_like(x, device="meta")
        begin, end = self._end, self._end + there.nbytes
        self._end += on_line(there.nbytes)
        if end > self._memory.nbytes:
            raise ModelError(
                f"host_optimizer: a parameter of {format_bytes(there.nbytes)} is larger than all that were trained when"
                f" its plan was made; {LEAVE_OUT}"
            )
        return self._memory[begin:end].view(x.dtype).as_strided(x.shape, there.stride())


def _fused(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group's options with torch's fused kernels, where these exist and the options name no others."""
    named = any(group.get(name) is not None for name in ("foreach", "fused")) or "fused" not in group
    return group if named or any(p.is_complex() for p in group["params"]) else {**group, "fused": True}


def _refusal(module: LightningModule, optimizer: Optimizer) -> str:
    if why := why_whole(optimizer):
        return why
    if any(group.get("capturable") for group in optimizer.param_groups):
        return "capturable=True of the optimizer is for graphs of a GPU, and the step runs on the host"
    trainer = module._trainer
    scaler = None if trainer is None else getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
        return "a fused optimizer scales gradients itself with precision='16-mixed'; set fused=None"
    return ""


def _to_host(state: Any) -> None:
    for own in state.values():
        own.update({key: value.to("cpu") for key, value in own.items() if isinstance(value, Tensor)})


def _to_device(optimizer: Optimizer, *_: Any) -> None:
    """Let state follow its parameters, as after a rescue that has taken another plan."""
    if update_on_host(optimizer) is not None:
        return
    for parameter, own in optimizer.state.items():
        moved = {key: value for key, value in own.items() if isinstance(value, Tensor) and key != "step"}
        own.update({key: value.to(parameter.device) for key, value in moved.items()})
