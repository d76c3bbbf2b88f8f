"""Install `compiled_budget`: the training step compiles its modules with an activation memory budget."""

from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_amp._torch import has_no_values, is_wrapped, runs_uncompiled
from lightning_amp.errors import InstallError, ModelError
from lightning_amp.footprint.copies.fake_copy import tensors_of_all
from lightning_amp.techniques.compiled_budget.graphs import compiled_in, counted_call
from lightning_amp.techniques.compiled_budget.partition import partitioned_within
from lightning_amp.techniques.compiled_budget.row import CompiledBudget
from lightning_amp.techniques.contract.change import Change
from lightning_amp.techniques.put_methods import method_of, methods_put

NOTHING = "no module is compiled: compile a module of the LightningModule, by `self.net.compile()`, before the fit"
WHOLE = (
    "the whole LightningModule was given to torch.compile, with Lightning's code around its modules; compile the"
    " modules in it instead, by `self.net.compile()`"
)


def refusal(module: LightningModule, step: Any, *, values: bool) -> str:
    """Return why a module has no graphs with a budget, or ""."""
    found = compiled_in(module)
    if not found:
        return NOTHING
    if is_wrapped(module):
        return WHOLE
    return "its step needs values, and graphs are counted without" if step.profile.reason else ""


def install(module: nn.Module, spec: CompiledBudget, mesh: object) -> Change:
    """Replace the training step of a LightningModule by one that partitions graphs within a budget.

    What the step computes stays: the partitioner decides which tensors of the forward graph are kept, and which the
    backward graph computes again from these, by the same operators (random ones with the same state).
    """
    if not isinstance(module, LightningModule):
        raise InstallError(f"compiled_budget requires a LightningModule, found {type(module).__name__!r}")
    if is_wrapped(module) or not compiled_in(module):
        raise InstallError(f"compiled_budget: {WHOLE if is_wrapped(module) else NOTHING}")
    # code that was compiled before has the budget of then
    torch.compiler.reset()
    step, originals = method_of(module, "training_step"), compiled_in(module)
    calls = WeakKeyDictionary[nn.Module, Callable[..., Any]]()

    @wraps(step)
    def run(module: LightningModule, *args: Any, **kwargs: Any) -> Any:
        fakes = list[tuple[nn.Module, dict[str, Any]]]()
        if any(has_no_values(tensor) for tensor in tensors_of_all(module)):
            for name, original in originals.items():
                child = module.get_submodule(name)
                if child not in calls:
                    calls[child] = counted_call(child, original, name)
                put = "forward" if is_wrapped(child) else "_compiled_call_impl"
                fakes.append((child, {put: calls[child]}))
        elif runs_uncompiled():
            raise ModelError(
                "compiled_budget: this step runs uncompiled, as a count with values does or"
                " torch.compiler.set_stance('force_eager'), and would keep other bytes; leave compiled_budget out"
            )
        with methods_put(fakes), partitioned_within(spec.share):
            return step(module, *args, **kwargs)

    return Change({}, methods={"training_step": run}, removed=torch.compiler.reset)
