"""Define `lightning_amp.chunk` and the installer of the technique: run a forward pass in chunks within a memory budget.

The module is captured as one graph if possible, otherwise block by block (the children of its lists and sequences).
Regions of the graph are chosen that meet the budget in the least time (regions/), and the forward that runs them is
generated (lower.py). A graph holds for one signature (graph/guards.py): a call with other shapes, dtypes, settings or
modes is planned separately before it runs. If neither the module nor a block can be captured, or the budget cannot be
met, an error is raised. Exception: a rule's block that needs more than planned runs with the least bytes, and warns.
"""

import copy
from typing import Any, TypeVar

import torch
from torch import nn

from lightning_amp.costs.device_rates import Rates
from lightning_amp.errors import InstallError, ModelError
from lightning_amp.footprint.forward_overrides import Override, add_override
from lightning_amp.quantities import parse_bytes
from lightning_amp.techniques.chunk.row import ChunkBlock
from lightning_amp.techniques.chunk.run.check import Checked
from lightning_amp.techniques.chunk.run.in_chunks import InChunks
from lightning_amp.techniques.chunk.run.module_chunks import CHUNKS, ModuleChunks
from lightning_amp.techniques.contract.change import Change

M = TypeVar("M", bound=nn.Module)


def chunk(
    module: M,
    *example_args: Any,
    budget: str | int = "2GiB",
    policy: str = "auto",
    rates: Rates | None = None,
    **example_kwargs: Any,
) -> M:
    """Return a copy of a module whose forward pass runs in chunks, within a memory budget.

    Regions of the forward pass run a few rows at a time, so that inner tensors are never complete. The copy shares
    every parameter and buffer with the module, which does not change; `state_dict` has the same names and tensors.

    Calls with other shapes, dtypes, modes (`train`, autocast, gradients) or attributes than the example's are planned
    separately for the same budget. With gradients, the same regions are recomputed in the backward pass, chunk by
    chunk, and loss and gradients equal the module's own to rounding; the budget does not bound what autograd keeps.
    Active dropout is never inside a region.

    Args:
        module: Any module; in evaluation mode for inference.
        example_args: Arguments of one call. If they have values, the generated forward is compared with the module's
            own, in float64 on a few positions of each; a module that is planned block by block is compared in its first
            call.
        budget: Bound of the bytes of all tensors alive in one forward pass without gradients, beyond parameters,
            buffers and arguments: a number, or text such as "2GiB".
        policy: What the plan minimizes: "auto" the time predicted with the device's rates, "paper" AutoChunk's cost
            (Equations 8 to 10 of Zhao et al. 2024).
        rates: Rates of the device, as from `lightning-amp calibrate`; None takes those of the module's device.
        example_kwargs: Keyword arguments of that call.

    Returns:
        A copy of the module; its `plan` (ModuleChunks) has the predicted `peak_bytes`, the regions of every block and
        the generated code.

    Raises:
        PlanError: The budget cannot be met (the message has the smallest possible one), or the policy is unknown.
        ModelError: The module cannot be captured, neither as one graph nor by its blocks; the message says why.
        InstallError: The generated forward gives a different result, such as with a wrong `register_flow` rule.
    """
    taken = "forward" if "forward" in vars(module) else "plan" if hasattr(module, "plan") else ""
    if taken:
        raise ModelError(
            f"cannot chunk {type(module).__name__!r}, which has an attribute {taken!r}, a name that the"
            " chunked module uses; give a module without it, such as one that holds this one"
        )
    # deepcopy keeps the same parameter and buffer objects
    shared = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    try:
        twin = copy.deepcopy(module, shared)
    except Exception as error:
        raise ModelError(
            f"cannot chunk {type(module).__name__!r}, which cannot be copied: {error!r}; take what cannot be"
            " copied out of its attributes"
        ) from error
    runner = InChunks(parse_bytes(budget), policy=policy, rates=rates)
    add_override("", twin, Override(CHUNKS[1], runner))
    with torch.no_grad():
        planned = runner.planned(twin, example_args, example_kwargs)
        # checked now, because the check itself does not stay within the budget of a forward pass
        if isinstance(planned.run, Checked):
            planned.run.check(twin, example_args, example_kwargs)
    twin.plan = planned.chunks  # type: ignore[assignment]
    return twin


def chunk_block(module: nn.Module, spec: ChunkBlock, mesh: object) -> Change:
    """Install chunks on a block of any module.

    The module and its hooks do not change; only the forward that it runs is replaced.

    Args:
        module: Any block; a call uses its current parameters and buffers.
        spec: Budget in bytes, and how regions are chosen.
        mesh: Not used: chunks are independent of ranks.

    Raises:
        InstallError: The budget is not positive, or the policy or a rate is not allowed.
    """
    n_bytes = spec.budget_bytes
    if n_bytes < 1:
        raise InstallError(
            f"chunk of {type(module).__name__!r} got budget_bytes={n_bytes!r}; allowed is a number of bytes"
            " larger than zero"
        )
    problem = spec.problem()
    if problem:
        raise InstallError(f"chunk of {type(module).__name__!r} got {problem}")
    forward = InChunks(n_bytes, train=True, policy=spec.policy, rates=spec.speed)
    return Change({}, forwards={"": forward})


def show_code(plan: ModuleChunks | nn.Module) -> str:
    """Return the generated forward as Python source, for a module that `chunk` returned or for its plan.

    Raises:
        ModelError: The module was not returned by `chunk`.
    """
    found = getattr(plan, "plan", None) if isinstance(plan, nn.Module) else plan
    if not isinstance(found, ModuleChunks):
        raise ModelError(
            f"{type(plan).__name__!r} has no generated code; give what lightning_amp.chunk returned, or its plan"
        )
    return "\n\n".join(f"# {fqn or 'the whole module'}\n{code}" for fqn, code in found.code.items())
