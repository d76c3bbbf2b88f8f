"""Store what a training batch may change before its optimiser's step, and put it back, so that the batch can run again.

    put back    random streams, buffers, metrics, logged values, counters of the loop, attributes of modules and of the
                user's callbacks, their lists, dicts and objects, classes and files of the step (restore_state.py), and
                parameters that the profiled step writes to before its update, such as those of a key encoder
    compared    other parameters, the batch, and tensors beyond `COPIED` bytes in attributes

What is compared cannot be put back: if it has changed, the batch must not run again, and `changed` names it.

Known limits: those of restore_state.py; NumPy arrays beyond `COPIED` bytes; tensors beyond it in attributes changed
through `.data`; side effects outside the process, such as lines of a logger.
"""

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_amp.data.batch import dense_parts, tensors_in
from lightning_amp.footprint.copies.fake_copy import DATA
from lightning_amp.footprint.copies.restore_state import DEPTH, Before, has_code_of_user
from lightning_amp.footprint.module_profile import BATCH
from lightning_amp.lightning.consistency.same_parameters import print_of
from lightning_amp.random_streams import random_streams, set_random_streams

COPIED = 2**26
"""Most bytes of tensors and arrays in attributes that are copied for a batch."""
OF_TORCH = ("_parameters", "_buffers", "_modules")


class StateOfBatch(Before):
    """State of a module and of its loop before a batch.

    Args:
        loop: Lightning's loop that runs the batch.
        written: Parameters that are copied, and "batch" to copy the batch.
    """

    def __init__(self, module: pl.LightningModule, loop: Any, batch: Any, written: Collection[str]) -> None:
        super().__init__()
        self._module, self._loop = module, loop
        self._random, self._progress = random_streams(), loop.optim_progress.state_dict()
        self._results = module.trainer.fit_loop.epoch_loop._results
        self._logged, self._left = set(self._results), COPIED
        self._values: list[tuple[Tensor, Tensor]] = []
        self._states: list[Tensor] = []
        self._prints: dict[str, tuple[Tensor, Tensor | int]] = {}
        self._versions: dict[str, tuple[Tensor, int]] = {}
        self._flags = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
        given = [(BATCH, part) for tensor in tensors_in(batch) for part in dense_parts(tensor) or (tensor,)]
        for i, (name, tensor) in enumerate([*module.named_parameters(), *given]):
            self._seen.add(id(tensor))
            if name in written:
                self._copy(tensor)
            elif tensor.layout is torch.strided and not tensor.is_meta:
                self._prints[f"{name} {i}" if name == BATCH else name] = tensor, _print(tensor)
        for buffer in module.buffers():
            # a step may change a buffer in place, or replace it
            self._seen.add(id(buffer))
            self._copy(buffer)
        self._seen |= {id(module.trainer), *map(id, self._results.values())}
        for child in module.modules():
            self._keep_attributes(child)
        callbacks: list[pl.Callback] = module.trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks:
            if has_code_of_user(type(callback)):
                self.keep_names(callback, DEPTH)
        self.keep_code([module])
        for metric in (*(child for child in module.modules() if isinstance(child, Metric)), *self._results.values()):
            self._keep_metric(metric)

    def keep(self, value: Any, depth: int) -> None:
        """Add a value; of a module that is not a child, as in a list, all attributes and tensors."""
        kind = type(value)
        if id(value) in self._seen or issubclass(kind, DATA):
            return
        if issubclass(kind, Tensor | np.ndarray):
            self._seen.add(id(value))
            self._keep_values(value)
        elif issubclass(kind, nn.Module):
            for child in value.modules():
                self._keep_attributes(child)
        else:
            super().keep(value, depth)

    def _keep_attributes(self, module: nn.Module) -> None:
        if id(module) in self._seen or isinstance(module, torch.jit.ScriptModule):
            return
        self._seen.add(id(module))
        if has_code_of_user(type(module)) and not isinstance(module, Metric):
            self.keep_names(module, DEPTH)
            return
        # attributes of a torch layer do not change, except for these; hooks are many
        training = module.training
        self.undo.append(lambda: setattr(module, "training", training))
        for name in OF_TORCH:
            self.keep(vars(module)[name], 1)

    def _keep_values(self, value: Tensor | np.ndarray) -> None:
        if value.nbytes <= self._left:
            self._left -= value.nbytes
            if isinstance(value, Tensor):
                self._copy(value)
            else:
                self.undo.append(partial(np.copyto, value, value.copy()))
        elif isinstance(value, Tensor) and not value.is_inference():
            self._versions[f"a tensor {list(value.shape)} of an attribute"] = value, value._version

    def _copy(self, tensor: Tensor) -> None:
        if tensor.layout is torch.strided and not tensor.is_meta:
            self._values.append((tensor, tensor.detach().clone()))

    def _keep_metric(self, metric: Metric) -> None:
        # the states that an update changes, also of values logged by Lightning, which are metrics too
        held = {name: getattr(metric, name) for name in metric._defaults}
        # lists are copied without their tensors, which are not changed and may have a graph
        states = _copies(held)
        self._states += [state for state in states.values() if isinstance(state, Tensor)]
        # these are replaced in an update, not changed, and may have a graph that cannot be copied
        others = {name: getattr(metric, name) for name in ("_update_count", "_computed", "_forward_cache")}
        # copies again, because the next pass may change them in place, and is put back too
        self.undo.append(lambda: vars(metric).update(_copies(states) | others))

    @property
    def copied(self) -> list[Tensor]:
        """The copies of tensors."""
        return [*(copy for _, copy in self._values), *self._states]

    @property
    def compared(self) -> list[Tensor]:
        """The tensors that are not copied."""
        return [tensor for tensor, _ in (*self._prints.values(), *self._versions.values())]

    @torch.no_grad()
    def changed(self) -> list[str]:
        """Return the names of what has changed and cannot be put back."""
        prints = [name for name, (tensor, before) in self._prints.items() if bool(_print(tensor) != before)]
        return prints + [name for name, (tensor, version) in self._versions.items() if tensor._version != version]

    def restore(self) -> None:
        """Put the state back, without gradients."""
        for parameter, learns in self._flags:
            parameter.grad = None
            parameter.requires_grad_(learns)
        with torch.no_grad():
            for tensor, before in self._values:
                if tensor.shape != before.shape:
                    tensor.data = before
                elif not torch.equal(tensor, before):
                    tensor.copy_(before)
        for undo in self.undo:
            undo()
        for name in set(self._results) - self._logged:
            del self._results[name]
        self._loop.optim_progress.load_state_dict(self._progress)
        self.restore_draws()

    def restore_draws(self) -> None:
        """Put the random streams back."""
        set_random_streams(self._random)


def _copies(states: Mapping[str, Any]) -> dict[str, Any]:
    return {name: list(x) if isinstance(x, list) else x.detach().clone() for name, x in states.items()}


def _print(tensor: Tensor) -> Tensor | int:
    """Return the print of a tensor: a number on a CPU, where it takes none of the budget, elsewhere without waiting."""
    found = print_of(tensor)
    return int(found) if found.device.type == "cpu" else found
