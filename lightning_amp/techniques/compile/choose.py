"""Decide which blocks of a module `AMPStrategy(compile=)` compiles, and whether compilation pays."""

from collections.abc import Collection, Mapping
from math import inf
from typing import Literal

from torch import nn

from lightning_amp._torch import AnyBatchNorm, is_compiled
from lightning_amp.costs.rule import Rule
from lightning_amp.errors import PlanError
from lightning_amp.footprint.chain.chain import Chain
from lightning_amp.footprint.find_blocks import find_blocks
from lightning_amp.quantities import format_seconds
from lightning_amp.techniques.compile.row import CompileBlock
from lightning_amp.techniques.contract.protocol import find_decoders

NAME = "compile"
LEFT = 0.25
"""Launches of a compiled block, as a share of the eager one's. Of a stratum 33 of 215 kernels were left (docs/reports/
gpu.md); blocks of products have more."""
COMPILE_SECONDS = 30.0
"""Seconds to compile the blocks of one class; first steps of the same page took 14 to 32 s."""
PASSES = 3
"""Time of both passes of a block, in forward passes."""
EAGER_BYTES = "bytes are those of the eager step: torch's compiler decides what compiled blocks keep"
UNKNOWN_BYTES = (
    "device_memory is given, and what compiled blocks keep is not predicted: in most models less than eagerly, in a"
    " ResNet 7 % more. Leave device_memory out, or compile modules yourself, whose graphs can be counted"
)


def compilable(module: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks with submodules that the user has not compiled, by name."""
    compiled = [part for child in module.modules() if is_compiled(child) for part in child.modules()]
    own = set(map(id, compiled))
    return {
        name: block
        for name, block in find_blocks(module).items()
        # a layer alone is one kernel already
        if any(True for _ in block.children()) and own.isdisjoint(map(id, block.modules()))
    }


def blocks_to_compile(
    module: nn.Module,
    option: Literal["auto"] | bool,
    others: Collection[str],
    *,
    shared: bool,
    budgeted: bool,
    chain: Chain | None,
    steps: float,
) -> tuple[tuple[Rule, ...], str]:
    """Return the rules for the blocks to compile, and one sentence why these, or why none.

    Args:
        option: As given: all blocks, or, with "auto", only if launches bind and compilation pays in this run.
        others: Techniques of the plan that compiled blocks do not support.
        shared: Whether ranks share batch statistics.
        budgeted: Whether the user has named a budget.
        chain: The step on the rates of a GPU; None on a CPU, or if it was not counted.
        steps: Training steps of the run.

    Raises:
        PlanError: `option` is True, and nothing can be compiled.
    """
    blocks = compilable(module)
    why = UNKNOWN_BYTES if budgeted else _why_not(module, blocks, others, shared=shared)
    if not (why or blocks):
        why = "the module has no blocks with submodules outside of what its user has compiled; blocks= names them"
    if why and option is True:
        raise PlanError(f"compile=True is not supported: {why}. Or set compile=False")
    reason = "requested by the user"
    if option == "auto":
        kinds = len({type(block).forward for block in blocks.values()})
        why, reason = (why, "") if why or chain is None else _pays(chain, blocks, steps, COMPILE_SECONDS * kinds)
        if not reason:
            return (), why and f"compile='auto' compiles nothing: {why}"
    rules = tuple(Rule(fqn=name, spec=CompileBlock(), strategy=NAME, why=reason) for name in blocks)
    return rules, f"compiles {len(blocks)} block{'s' * (len(blocks) > 1)} ({reason}); {EAGER_BYTES}"


def _why_not(module: nn.Module, blocks: Mapping[str, nn.Module], others: Collection[str], *, shared: bool) -> str:
    norms = [name for name, block in blocks.items() if any(isinstance(m, AnyBatchNorm) for m in block.modules())]
    if decoders := list(find_decoders(module)):
        return f"{decoders[0]!r} is a decoder of strata, which strategies='...,compile' compiles"
    if others:
        return f"it was not tried together with {', '.join(others)}, which the plan has; leave one of them out"
    if shared and norms:
        return f"ranks share the batch statistics of {norms[0]!r}; share_batch_statistics=False gives each rank its own"
    return ""


def _pays(chain: Chain, blocks: Collection[str], steps: float, compiling: float) -> tuple[str, str]:
    """Return why compilation does not pay, or "", and why it does, or ""."""
    work = chain.seconds - chain.launch_seconds
    launched = f"launches take {format_seconds(chain.launch_seconds)} of a step, and arithmetic and bytes"
    launched += f" {format_seconds(work)}"
    if chain.launch_seconds <= work:
        return launched, ""
    within = PASSES * sum(block.forward_seconds for block in chain.blocks if block.fqn in blocks) / chain.seconds
    left = chain.launch_seconds * (1 - min(1.0, within) * (1 - LEFT))
    saved = steps * (chain.launch_seconds - max(work, left))
    run = "the run has no end" if steps == inf else f"{steps:,.0f} steps save about {format_seconds(saved)}"
    said = f"{launched}; {run}, and compilation takes about {format_seconds(compiling)}"
    return ("", said) if saved > compiling else (said, "")
