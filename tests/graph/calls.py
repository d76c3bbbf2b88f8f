"""Blocks of the example modules, with what they are called with in a training step."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_amp._torch import tree_flatten, tree_leaves, tree_unflatten
from lightning_amp.footprint.find_blocks import find_blocks
from lightning_amp.graph import capture, captures
from lightning_amp.graph.guards import state_of
from lightning_amp.techniques.checks import same_function
from tests.any_module import make


@dataclass
class Called:
    """One call of a block."""

    fqn: str
    block: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Captures(captures.Captures):
    """With a run of what was captured."""

    @property
    def all(self) -> tuple[capture.Capture, ...]:
        return tuple(self._known.values())

    def run(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """What the block returns for a call: by its graph, or by itself where there is a reason for that."""
        found = self.of(block, args, kwargs)
        if found.graph is None:
            return block(*args, **kwargs)
        given = (value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor))
        return tree_unflatten(found.graph(*state_of(block).values(), *given), found.output)


def forward_of(module: pl.LightningModule, batch: Any) -> Callable[[], Any]:
    """The training step without a Trainer, so far as blocks are called in it."""
    module.log = lambda *_, **__: None  # type: ignore[method-assign]
    module.manual_backward = module.clip_gradients = lambda *_, **__: None  # type: ignore[method-assign]
    module.optimizers = lambda: _Optimizers()  # type: ignore[method-assign]
    return lambda: module.training_step(batch, 0)


class _Optimizers(list[Any]):
    """No optimiser, alone or in a list."""

    def zero_grad(self) -> None:
        return None

    step = zero_grad


def calls_of(name: str) -> list[Called]:
    """The calls of an example's blocks, one of every class and shape."""
    module, batch = make(name)
    return record(module, forward_of(module, batch))


def record(module: nn.Module, step: Callable[[], Any]) -> list[Called]:
    """The calls of a module's blocks while `step` runs."""
    found: dict[Any, Called] = {}

    def note(fqn: str) -> Any:
        def hook(block: nn.Module, args: Any, kwargs: Any) -> None:
            shapes = tuple(tuple(a.shape) for a in args if isinstance(a, torch.Tensor))
            found.setdefault((type(block), shapes), Called(fqn, block, args, kwargs))

        return hook

    hooks = [b.register_forward_pre_hook(note(fqn), with_kwargs=True) for fqn, b in find_blocks(module).items()]
    step()
    for hook in hooks:
        hook.remove()
    return list(found.values())


RTOL = 1e-10
"""Largest difference allowed, as a share of the largest value of the tensor that is compared."""

Form = Callable[..., Any]


def difference(block: nn.Module, form: Form, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> str:
    """What a form of a block computes otherwise, in words; "" if nothing. Both draw the same random numbers.

    Args:
        block: Somebody's block; it is copied, and stays as it is.
        form: Called as `form(block, *args, **kwargs)` in the place of `block(*args, **kwargs)`.
        args: Arguments with values; those of floating point are taken in float64.
        kwargs: The same by name.
    """
    expected = _outcome(block, lambda twin, *a, **k: twin(*a, **k), args, kwargs or {})
    found = _outcome(block, form, args, kwargs or {})
    only = sorted(expected.keys() ^ found.keys())
    return f"has {only[0]!r} only on one side" if only else same_function.difference(found, expected, rtol=RTOL)


def _outcome(block: nn.Module, form: Form, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that the block computes, by name."""
    twin = copy.deepcopy(block).double()
    twin.zero_grad(set_to_none=True)
    values, spec = tree_flatten((tuple(args), dict(kwargs)))
    inputs = [_double(value) if isinstance(value, Tensor) else value for value in values]
    # what a block changes in place may not be a leaf
    given_args, given_kwargs = tree_unflatten([v + 0 if _differentiable(v) else v for v in inputs], spec)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        results = [r for r in tree_leaves(form(twin, *given_args, **given_kwargs)) if isinstance(r, Tensor)]
        generator = torch.Generator().manual_seed(1)
        weights = [torch.rand(r.shape, generator=generator, dtype=torch.float64) for r in results]
        loss = sum(((r * w).sum() for r, w in zip(results, weights, strict=True) if r.is_floating_point()), 0.0)
        if isinstance(loss, Tensor) and loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
    found: dict[str, Any] = {f"result {k}": r.detach() for k, r in enumerate(results)}
    found["loss"] = loss.detach() if isinstance(loss, Tensor) else loss
    found |= {f"gradient of input {k}": v.grad for k, v in enumerate(inputs) if isinstance(v, Tensor)}
    found |= {f"gradient of {name}": p.grad for name, p in twin.named_parameters()}
    return found | {f"buffer {name}": buffer.detach() for name, buffer in twin.named_buffers()}


def _double(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor.detach().clone()
    return tensor.detach().double().clone().requires_grad_(tensor.requires_grad)


def _differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
