"""Define `lightning_amp.chunk`, and the technique: a forward pass in chunks stays within a byte budget.

The module is captured as one graph where that is possible, otherwise block by block (the children of its lists and
sequences); regions of the graph are chosen that keep it within the budget in the least time (regions/), and what
the module runs from then on is generated (lower.py). A graph holds for one signature (graph/guards.py): a call with
other shapes, dtypes, settings or modes is planned for itself before it runs. Nothing runs in another way than planned:
what cannot be captured, or cannot be kept within the budget, is an error.
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
from lightning_amp.techniques.chunk.run.after_blocks_in_chunks import AfterBlocksInChunks
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

    Regions of the forward pass run a few rows at a time, so that their inner tensors are never whole. The result shares
    every parameter and buffer with the module, which stays as it is; `state_dict` has the same names and tensors.

    Calls with other shapes, dtypes, modes (`train`, autocast, gradients) or attributes than the example's are planned
    anew, each for the same budget. With gradients the same regions are computed again in the backward pass, chunk by
    chunk, and loss and gradients equal the module's own to rounding; the budget does not bound what autograd keeps.
    Active dropout is never inside a region.

    Args:
        module: Any module; in evaluation mode for inference.
        example_args: Arguments of one call. If they have values, the generated forward is compared with the module's
            own, in float64 on a few positions of each; a module that is no graph as a whole is compared in its first
            call.
        budget: Bound of the bytes of all tensors alive in one forward pass without gradients, beyond parameters,
            buffers and arguments: a number, or text such as "2GiB".
        policy: What the plan minimizes: "auto" the time predicted with the device's rates, "paper" AutoChunk's cost
            (Equations 8 to 10 of Zhao et al. 2024).
        rates: Rates of the device, as from `lightning-amp calibrate`; None takes those of the module's device.
        example_kwargs: The same by name.

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
    # with the same parameter and buffer objects
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
        # checked here, for what that takes is no part of a forward pass within the budget
        if isinstance(planned.run, Checked):
            planned.run.check(twin, example_args, example_kwargs)
    twin.plan = planned.chunks  # type: ignore[assignment]
    return twin


def chunk_block(module: nn.Module, spec: ChunkBlock, mesh: object) -> Change:
    """Let a block of any module run in chunks, or what a module computes after its blocks.

    It leaves the module as it is, hooks around it included, and sets what its forward runs.

    Args:
        module: Any block, or a module that has blocks; its own parameters and buffers are used as they are when it is
            called.
        spec: How many bytes it may take.
        mesh: Not looked at: chunks split nothing over ranks.

    Raises:
        InstallError: The budget is no positive number.
    """
    n_bytes = spec.budget_bytes
    if n_bytes < 1:
        raise InstallError(
            f"chunk of {type(module).__name__!r} got budget_bytes={n_bytes!r}; allowed is a number of bytes"
            " larger than zero"
        )
    forward = AfterBlocksInChunks(n_bytes, spec.after) if spec.after else InChunks(n_bytes, train=True)
    return Change({}, forwards={"": forward})


def show_code(plan: ModuleChunks | nn.Module) -> str:
    """The generated forward as Python: of a module that `chunk` returned, or of its plan.

    Raises:
        ModelError: Another module.
    """
    found = getattr(plan, "plan", None) if isinstance(plan, nn.Module) else plan
    if not isinstance(found, ModuleChunks):
        raise ModelError(
            f"{type(plan).__name__!r} has no generated code; give what lightning_amp.chunk returned, or its plan"
        )
    return "\n\n".join(f"# {fqn or 'the whole module'}\n{code}" for fqn, code in found.code.items())
