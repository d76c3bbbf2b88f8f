"""Add to a recorded step what training holds later, which its two steps do not show.

    an optimizer that has not stepped    gradients and state of its parameters, and the temporaries of its first step
    one that has stepped, where draws    state of parameters that these steps did not use
    decide which parameters are used
    LBFGS                                its history at its longest, `history_size`
    callbacks that average weights       their copies of the module, and the temporaries of an update

The first step of an optimizer runs here on fake tensors; nothing of the recorded step changes.

Known limits: what a step computes only for the late optimizer, such as a generator's loss, is not foreseen; nor are
parameters of an optimizer that has stepped which have had no gradient yet, nor copies that callbacks make later than in
their `setup`.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from lightning_amp._torch import FakeTensorMode
from lightning_amp.footprint.copies.fake_copy import without_values
from lightning_amp.footprint.copies.quick_fakes import QuickFakes
from lightning_amp.footprint.host_state import on_device
from lightning_amp.footprint.live_bytes import LiveBytes, tensors_of
from lightning_amp.footprint.module_profile import GRADIENTS, STATE, Life
from lightning_amp.footprint.step_recorder import StepRecorder
from lightning_amp.quantities import format_bytes

OF_UPDATE = {"StochasticWeightAveraging": 2}
"""Tensors that an update of averaged weights makes at once, of the size of one parameter; 3 in other callbacks."""


def foresee(
    recorder: StepRecorder,
    optimizers: Iterable[Optimizer],
    fake: FakeTensorMode | None,
    averaged: Iterable[tuple[str, int]],
) -> tuple[str, ...]:
    """Add storages to a recorded step; return what was added, one sentence each.

    Args:
        averaged: Callbacks that hold copies of the module, with their bytes.
    """
    said = []
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        late = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        if isinstance(optimizer, LBFGS):
            said += _history(recorder, optimizer, late)
        elif late and not optimizer.state and id(optimizer) not in recorder.stepped:
            try:
                n_bytes = _first_step(recorder, optimizer, fake or QuickFakes(valid=True))
            except Exception as error:
                said.append(
                    f"the optimizer {kind!r} has not stepped in the counted batches, and its state is in no count: on"
                    f" tensors without values its step fails with {type(error).__name__}"
                )
                continue
            said.append(
                f"the optimizer {kind!r} has not stepped in the counted batches: {format_bytes(n_bytes)} of gradients"
                " and state are counted for all of its parameters"
            )
        elif recorder.drew:
            _unused(recorder, optimizer, late)
    largest = max((parameter.nbytes for parameter in recorder.trained.values()), default=0)
    for name, n_bytes in averaged:
        recorder.lives.append(Life(f"copies of {name}", "", STATE, (n_bytes,), "uint8", n_bytes))
        said.append(f"{name} holds copies of the module: {format_bytes(n_bytes)} are counted for them")
        recorder.add_update(OF_UPDATE.get(name, 3) * largest)
    return tuple(said)


def _first_step(recorder: StepRecorder, optimizer: Optimizer, fake: FakeTensorMode) -> int:
    """Add what an optimizer's first step makes, and missing gradients; return their bytes."""
    total, names = 0, {id(p): name for name, p in recorder.trained.items()}
    with fake, without_values():
        twin, pairs = _like(optimizer)
        live = LiveBytes()
        live.watch([[own, own.grad] for _, own in pairs])
        with live:
            twin.step()
    here = bool(on_device([optimizer]))
    for parameter, own in pairs:
        name = names.get(id(parameter), "")
        for key, value in twin.state.get(own, {}).items() if here else ():
            total += sum(_add(recorder, f"{name}.{key}", STATE, tensor) for tensor in tensors_of(value))
        if parameter.grad is None:
            total += _add(recorder, f"{name}.grad", GRADIENTS, parameter)
    if here:
        recorder.add_update(live.peak - live.current)
    return total


def _unused(recorder: StepRecorder, optimizer: Optimizer, parameters: list[nn.Parameter]) -> None:
    """Add the state of parameters that have none, of the shapes that it has for others."""
    names = {id(p): name for name, p in recorder.trained.items()}
    like = next(((p, optimizer.state[p]) for p in parameters if optimizer.state.get(p)), None)
    if like is None or not on_device([optimizer]):
        return
    for parameter in parameters:
        if not optimizer.state.get(parameter):
            for key, value in like[1].items():
                for tensor in tensors_of(value):
                    whole = tensor.shape == like[0].shape
                    _add(recorder, f"{names.get(id(parameter), '')}.{key}", STATE, parameter if whole else tensor)


def _add(recorder: StepRecorder, name: str, kind: str, tensor: Tensor) -> int:
    fqn, n_bytes = name.rpartition(".")[0].rpartition(".")[0], tensor.untyped_storage().nbytes()
    dtype = str(tensor.dtype).removeprefix("torch.")
    recorder.lives.append(Life(name, fqn, kind, tuple(tensor.shape), dtype, n_bytes))
    return n_bytes


def _like(optimizer: Optimizer) -> tuple[Any, list[tuple[Tensor, Tensor]]]:
    """Return an optimizer with the same options and without state, and pairs of parameters: the given one, its own."""
    pairs, groups = list[tuple[Tensor, Tensor]](), []
    for group in optimizer.param_groups:
        own = []
        for p in group["params"]:
            if p.requires_grad:
                new = torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device=p.device).requires_grad_()
                new.grad = torch.empty_like(new)
                own.append(new)
                pairs.append((p, new))
        groups.append({**group, "params": own})
    twin = object.__new__(type(optimizer))
    # a scheduler and a run set `step` on the instance, bound to the given optimizer
    vars(twin).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    vars(twin).update({name: OrderedDict() for name in vars(twin) if name.endswith("_hooks")})
    twin.state, twin.param_groups = defaultdict(dict), groups
    return twin, pairs


def _history(recorder: StepRecorder, optimizer: LBFGS, parameters: list[nn.Parameter]) -> list[str]:
    """Add what is missing of LBFGS's history: two tensors of all parameters for each step of it."""
    state: dict[str, Any] = next(iter(optimizer.state.values()), {})
    missing = max(0, optimizer.param_groups[0]["history_size"] - len(state.get("old_dirs") or ()))
    if not missing:
        return []
    # two for each step of it; when it is full, a new entry is made before the oldest one goes
    n_bytes = (2 * missing + 1) * sum(parameter.nbytes for parameter in parameters)
    recorder.lives.append(Life("history of LBFGS", "", STATE, (n_bytes,), "uint8", n_bytes))
    return [f"LBFGS is counted with its history at its longest, {format_bytes(n_bytes)} more than in the second step"]


def averaged_by(trainer: Trainer) -> tuple[tuple[str, int], ...]:
    """Return the callbacks of a run that hold copies of its module, with their bytes on the run's device."""
    found = dict[str, int]()
    for name, tensor in copies_in_callbacks(trainer):
        found[name] = found.get(name, 0) + tensor.nbytes
    return tuple(found.items())


def copies_in_callbacks(trainer: Trainer) -> list[tuple[str, Tensor]]:
    """Return the tensors of modules that callbacks hold on the run's device, each with the callback's name."""
    found, callbacks = list[tuple[str, Tensor]](), getattr(trainer, "callbacks", [])
    if not callbacks:
        return found
    # None before a run, as where a configuration is planned: callbacks have no copies yet
    module, device = trainer.lightning_module, trainer.strategy.root_device
    seen = set[int]() if module is None else {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    for callback in callbacks:
        for held in vars(callback).values():
            if not isinstance(held, nn.Module) or held is module:
                continue
            for tensor in (*held.parameters(), *held.buffers()):
                if id(tensor) not in seen and tensor.device.type == device.type:
                    seen.add(id(tensor))
                    found.append((type(callback).__name__, tensor))
    return found
