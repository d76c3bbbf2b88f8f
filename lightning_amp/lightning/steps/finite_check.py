"""Find the source of the first NaN or infinity: module, stratum and rank.

    forward     of every module, the first call whose output is not finite although its inputs are
    loss        looked at before backward, on the rank that has it and before any rank has averaged with it
    gradient    looked at as soon as it is accumulated, before it is averaged: the first in the order of backward; under
                fsdp the rank's rows of it once they are averaged

Outputs by themselves stop nothing: a module may well return -inf where a score is masked. Looking waits for the device.

Known limits: gradients are not looked at under loss scaling (precision="16-mixed"), which overflows on purpose and
skips such steps; what is computed outside of modules is attributed to no module.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_amp.data.batch import tensors_in
from lightning_amp.errors import ModelError
from lightning_amp.techniques.contract.sharded_parameter import local

STRATUM = re.compile(r"\bstrata\.(\d+)\b")


class FiniteCheck:
    """Watches one module as it is trained, its gradients too if asked."""

    def __init__(self, module: nn.Module, *, rank: int, gradients: bool) -> None:
        self._rank = rank
        self._first = self._reader = self._gradient = ""
        self._handles: list[Any] = []
        for name, child in module.named_modules():
            if name:
                self._handles.append(child.register_forward_hook(self._look_at(name), with_kwargs=True))
        for name, parameter in module.named_parameters() if gradients else ():
            if parameter.requires_grad:
                look = self._look_at_gradient(name)
                self._handles.append(parameter.register_post_accumulate_grad_hook(look))  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()

    def start(self) -> None:
        """A training step begins."""
        self._first = self._reader = self._gradient = ""

    def check_loss(self, output: Any) -> None:
        """Refuse, with a ModelError, a loss that is not finite, as the step returned it or a manual backward got it."""
        loss = output.get("loss") if isinstance(output, dict) else output
        if isinstance(loss, Tensor) and not _is_finite(loss):
            raise ModelError(f"{self._seen(f'a loss of {loss.detach().sum().item()!r}')}{self._origin()}")

    def check_gradients(self) -> None:
        """Refuse, with a ModelError, gradients that are not finite, before they are averaged."""
        if self._gradient:
            what = f"a gradient that is not finite, first that of parameter {self._gradient!r}"
            raise ModelError(f"{self._seen(what)}{_stratum(self._gradient)}{self._origin()}")

    def _seen(self, what: str) -> str:
        return f"check_finite=True requires finite numbers; rank {self._rank} found {what}"

    def _origin(self) -> str:
        if self._reader and not self._first:
            return f"; it came up outside of modules, before {self._reader!r}{_stratum(self._reader)} read it"
        if not self._first:
            return "; every module's output was finite. Look at what the loss does with them"
        return (
            f"; the first output that is not finite, of finite inputs, is that of module {self._first!r}"
            f"{_stratum(self._first)}. Look at its inputs in this step, at the learning rate, and at the precision"
        )

    def _look_at(self, name: str) -> Callable[..., None]:
        def look(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self._first or _all_finite(output):
                return
            if _all_finite((args, kwargs)):
                self._first = name
            else:
                self._reader = self._reader or name

        return look

    def _look_at_gradient(self, name: str) -> Callable[[Tensor], None]:
        def look(parameter: Tensor) -> None:
            if not self._gradient and parameter.grad is not None and not _is_finite(parameter.grad):
                self._gradient = name

        return look


def _stratum(name: str) -> str:
    found = STRATUM.search(name)
    return f" (stratum {found.group(1)})" if found else ""


def _all_finite(values: Any) -> bool:
    floating = (t for t in tensors_in(values) if t.is_floating_point() and t.layout is torch.strided)
    return all(map(_is_finite, floating))


def _is_finite(tensor: Tensor) -> bool:
    # of a shard the rank's own entries: other ranks may not look now
    return bool(torch.isfinite(local(tensor.detach())).all())
