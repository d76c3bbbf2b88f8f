"""Profile a LightningModule and a batch into a Chain: the blocks that can be recomputed, and the resulting peaks.

Blocks are the named ones, else the children of the outermost lists and sequences (find_blocks.py), in the order in
which the step calls them; in a U-Net, these are the blocks of its down, middle and up path. A list inside a block
belongs to that block, which is recomputed as a unit. A block that cannot run twice (recompute_state.py) is not
recomputed, and the chain has the reason.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule

from lightning_amp.footprint.chain.block_call import BlockCall
from lightning_amp.footprint.chain.build_chain import ChainBuilder
from lightning_amp.footprint.chain.chain import Chain
from lightning_amp.footprint.chain.chain_recorder import ChainRecorder
from lightning_amp.footprint.chain.impossible_stages import impossible
from lightning_amp.footprint.chain.passes import Passes, passes_of
from lightning_amp.footprint.copies.copy_batch import length_of
from lightning_amp.footprint.find_blocks import refuse_uncalled
from lightning_amp.footprint.module_profile import REAL, ModuleProfile
from lightning_amp.footprint.operator_rates import OperatorRates
from lightning_amp.footprint.profile_module import counted_step, profile_of
from lightning_amp.footprint.run.run_settings import BY_ITSELF, RunSettings
from lightning_amp.footprint.run_again.own_checkpoints import watching_checkpoints

CPU_CORE = OperatorRates(matmul_flops=140e9, memory_bytes=11.5e9, overhead_seconds=8e-6)
"""Rates of one core of a server CPU (costs/device_rates.py)."""
TRANSFORMED = "the step calls torch.func.grad or a similar function, with which it is not known what blocks keep"
NO_BLOCKS = "it has no ModuleList or Sequential of two modules and more that could be stages"


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedStep:
    """Results of one counted step.

    Attributes:
        profile: Its bytes, as in `profile_module`.
        chain: Its blocks.
        passes: Its passes through the blocks as pipeline stages, or why there are none.
        calls: Call of each of its blocks.
        no_stages: Why its blocks cannot be pipeline stages; "" if they can.
        no_second_pass: Why none of its blocks can run a second time; "" if blocks can.
        decides: Whether it draws random numbers that may decide which blocks run.
        went_back: Modules that a backward pass started by `training_step` itself has passed through.
        differentiated: Those of them whose backward pass is recorded for a second derivative.
        swapped: Blocks that it called with replaced parameters.
        copied: Blocks of which it called a copy that it had made.
        read_outside: Blocks whose parameters it read outside of their calls.
        written: Parameters that it changed before the optimizer's step, and "batch" if it changed the batch.
        own_checkpoints: Whether the user's code checkpoints parts of it.
        factors: Last two dims of the second factors of its products, the smaller one first.
        scored: Numbers of classes of its cross-entropy, and of its choice of the largest.
    """

    profile: ModuleProfile
    chain: Chain
    passes: Passes | str
    calls: tuple[BlockCall, ...]
    no_stages: str
    no_second_pass: str
    decides: bool
    went_back: frozenset[str]
    differentiated: frozenset[str]
    swapped: frozenset[str]
    copied: frozenset[str]
    read_outside: frozenset[str]
    written: frozenset[str]
    own_checkpoints: bool = False
    factors: frozenset[tuple[int, int]] = frozenset()
    scored: frozenset[int] = frozenset()


def count_step(
    module: LightningModule,
    batch: Any,
    names: Sequence[str],
    *,
    batch_size: int | None = None,
    rates: OperatorRates = CPU_CORE,
    run_settings: RunSettings = BY_ITSELF,
) -> CountedStep:
    """Count the second training step on fake tensors, as `profile_module` does; the module does not change.

    Args:
        module, batch, batch_size, run_settings: As in `profile_module`.
        names: Names of the blocks that could be stages, in order.
        rates: Rates of the device whose time is predicted.

    Raises:
        ModelError: As in `profile_module`.
        PlanError: The step does not call a named block.
    """
    make = partial(ChainRecorder, rates=rates, stages=names)
    seen = list[bool]()
    with watching_checkpoints(lambda: seen.append(True)):
        step, reason = counted_step(
            module, batch, batch_size, make, run_settings, plain=partial(make, watches_saved=False)
        )
    if step.watches_saved:
        refuse_uncalled(module, {call.fqn for call in step.calls})
    rows = length_of(batch) if batch_size is None else batch_size
    passes: Passes | str = NO_BLOCKS
    if names:
        passes = "the tensors of its batch have no length in common"
        if len(step.lengths) > 1:
            # as for nodes and edges of graphs, where rows of one tensor index rows of another
            passes = f"no micro-batch can be cut from its batch, whose tensors have {sorted(step.lengths)!r} rows"
        elif rows is not None:
            passes = passes_of(step, names, rows=rows, values=step.measured == REAL)
    return CountedStep(
        profile=profile_of(step, step.whole_lives, reason, rows),
        chain=ChainBuilder(step, values=step.measured == REAL).chain(),
        passes=passes,
        calls=tuple(call.given for call in step.calls),
        no_stages=impossible(step, names),
        no_second_pass="" if step.watches_saved else TRANSFORMED,
        decides=step.decides,
        went_back=frozenset(step.went_back),
        differentiated=frozenset(step.differentiated),
        swapped=frozenset(step.swapped),
        copied=frozenset(step.copied),
        read_outside=step.read_outside,
        written=frozenset(step.written),
        own_checkpoints=bool(seen),
        factors=frozenset(step.factors),
        scored=frozenset(step.scored),
    )
