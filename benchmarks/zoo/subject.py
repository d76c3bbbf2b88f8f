"""A case of the zoo, the LightningModule around its network, and the library's own checkpointing."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.any_module.attributes import modules_of
from benchmarks.any_module.by_hand import blocks_of
from benchmarks.any_module.values import seed

Made = tuple[nn.Module, Any, Any]
"""A network; its inputs, a dict or a tuple of tensors whose first dim is the sample; its target, or None.

The loss is the cross-entropy of a target of integers, the mean square to one of real numbers. Without a target it is
the network's own, where the inputs have labels, or else the mean square of what it returns.
"""


class Case(NamedTuple):
    """A model by the name of its library: what is imported for it, and how it is made."""

    package: str
    make: Callable[[], Made]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=1e-3),
    "Adam": partial(torch.optim.Adam, lr=1e-3, foreach=False),
    "AdamW foreach": partial(torch.optim.AdamW, lr=1e-3, foreach=True),
    "Adafactor": partial(torch.optim.Adafactor, lr=1e-3),
}


class Subject(LightningModule):
    """A network of a library as a user would train it."""

    def __init__(self, network: nn.Module, optimizer: str = "SGD") -> None:
        super().__init__()
        self.network, self.optimizer = network, optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss."""
        inputs, target = batch["inputs"], batch.get("target")
        found = self.network(**inputs) if isinstance(inputs, Mapping) else self.network(*inputs)
        own = getattr(found, "loss", None)
        if target is None and own is not None:
            return own.mean()
        predicted = first_tensor(found)
        if target is None:
            return predicted.square().mean()
        if target.is_floating_point():
            return functional.mse_loss(predicted, target)
        return functional.cross_entropy(predicted, target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One of the four."""
        return OPTIMIZERS[self.optimizer](self.parameters())


def first_tensor(found: Any) -> Tensor:
    """The first result of a network, in whatever it returns."""
    while not isinstance(found, Tensor):
        if isinstance(found, Mapping):
            found = next(iter(found.values()))
        else:
            found = found[0] if isinstance(found, list | tuple) else next(iter(vars(found).values()))
    return found


def made(case: Case, dtype: torch.dtype, optimizer: str = "SGD") -> tuple[Subject, Any]:
    """The module and a batch, the same in each call."""
    # some libraries draw what they begin with from Python's generator
    seed(0)
    torch.set_default_dtype(dtype)
    try:
        network, inputs, target = case.make()
    finally:
        torch.set_default_dtype(torch.float32)
    batch = {"inputs": inputs} if target is None else {"inputs": inputs, "target": target}
    return Subject(network.train(), optimizer), batch


SWITCHES = ("gradient_checkpointing_enable", "enable_gradient_checkpointing", "set_grad_checkpointing")


def checkpoint_layers(network: nn.Module) -> str:
    """Checkpoint each layer: by the library's switch where it has one that works, else by torch; returns which."""
    inner = getattr(network, "base_model", network)
    for switch in SWITCHES:
        if hasattr(network, switch):
            try:
                getattr(network, switch)()
                return switch
            except (ValueError, NotImplementedError, AssertionError):
                # transformers and diffusers have the method also where a model does not support it
                continue
    layers = blocks_of(inner) or modules_of(inner)
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    return "torch"
