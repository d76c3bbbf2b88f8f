"""Capture the blocks of a training step, and compute their chunked forms; show the code that rules generate."""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn

from lightning_amp.costs.rule import Rule
from lightning_amp.footprint.chain.block_call import BlockCall
from lightning_amp.footprint.chain.chain_of import CountedStep
from lightning_amp.footprint.copies.fake_copy import copy_of
from lightning_amp.footprint.copies.quick_fakes import QuickFakes
from lightning_amp.graph.capture import Capture
from lightning_amp.graph.captures import Captures
from lightning_amp.graph.table import Table
from lightning_amp.techniques.chunk.forms import ChunkForms
from lightning_amp.techniques.chunk.regions.choose_chunks import CostModel
from lightning_amp.techniques.chunk.row import ChunkBlock
from lightning_amp.techniques.chunk.run.lower import table_of
from lightning_amp.techniques.chunk.run.module_chunks import plain
from lightning_amp.techniques.chunk.run.planned import plan_graph
from lightning_amp.techniques.contract.protocol import INSIDE, StepToPlan, normalises_by_batch
from lightning_amp.techniques.technique import result_or_reason


def block_tables(module: nn.Module, calls: Sequence[BlockCall], *, shared: bool = False) -> list[Table | str]:
    """Return for every call the table by which a `chunk` rule would be planned, or the reason why there is none.

    Calls of the same class and signature share one table; so do blocks with equal tables, such as those of a list.

    With `shared`, ranks exchange batch statistics, which a table cannot contain.
    """
    known: dict[Any, Table | str] = {}
    same: dict[Table | str, Table | str] = {}
    found: list[Table | str] = []
    for call, capture in zip(calls, _captured(module, calls, shared=shared), strict=True):
        if isinstance(capture, str):
            found.append(capture)
            continue
        # blocks with different keys may share a graph
        key = capture.graph or capture.key
        if key not in known:
            # a graph holds no casts of autocast
            with call.precision():
                made: Table | str = result_or_reason(table_of, capture) if capture.graph else capture.reason
            known[key] = same.setdefault(made, made)
        found.append(known[key])
    return found


def _captured(module: nn.Module, calls: Sequence[BlockCall], *, shared: bool = False) -> list[Capture | str]:
    """Return the capture of every call, or the reason why it was not captured."""
    captures, fake = Captures(follows=True), QuickFakes()
    found: list[Capture | str] = []
    # copied as a whole, so that blocks that share an object, such as a configuration, still do
    twin = cache(partial(copy_of, module, fake))
    for call in calls:
        if call.sparse:
            found.append("it is called with a tensor that is not dense")
            continue
        block = module.get_submodule(call.fqn)
        if any(parameter.is_meta for parameter in block.parameters()):
            # a block on the meta device is called with arguments of another device
            block = twin().get_submodule(call.fqn)
        if shared and any(map(normalises_by_batch, block.modules())):
            found.append("ranks exchange the statistics of a BatchNorm in it (share_batch_statistics)")
            continue
        if any(getattr(child, "sparse", False) is True for child in block.modules()):
            found.append("an embedding in it has gradients that are not dense")
            continue
        args, kwargs = call.arguments(fake)
        with call.precision():
            found.append(result_or_reason(captures.of, plain(block), args, kwargs))
    return found


def look(step: StepToPlan) -> ChunkForms:
    """Return the chunked forms of the step's blocks, which are captured on first use."""
    counted = step.step()

    def tables() -> list[Table | str]:
        calls = zip(counted.chain.blocks, counted.calls, strict=True)
        found: list[Table | str] = [
            INSIDE if block.fixed == INSIDE else _differentiated(counted, call) for block, call in calls
        ]
        # a capture takes as long as a step of its block, and that of a decoder's strata seconds
        captured = [call for call, reason in zip(counted.calls, found, strict=True) if not reason]
        made = iter(block_tables(step.module, captured, shared=step.shared_statistics))
        return [reason or next(made) for reason in found]

    return ChunkForms(counted.chain, tables, costs_of(step))


def costs_of(step: StepToPlan) -> CostModel:
    """Return the costs by which regions of this step are chosen: at the device's rates, as the user requested."""
    spec = step.requested.get("chunk")
    return CostModel(policy=spec.policy if isinstance(spec, ChunkBlock) else "auto", rates=step.operator_rates())


def _differentiated(step: CountedStep, call: BlockCall) -> str:
    """Return why a call has no chunks in a step that differentiates its backward pass; "" if the step does not."""
    found = any(f"{fqn}.".startswith(f"{call.fqn}.") for fqn in step.differentiated)
    return "a second derivative is not supported (create_graph=True), as of a gradient penalty" if found else ""


def refusal(module: LightningModule, step: CountedStep, *, values: bool) -> str:
    """Return why no block of the step can run in chunks; "" if blocks can."""
    return step.no_second_pass


def code(step: StepToPlan, rules: Sequence[Rule]) -> str:
    """Return the Python code of the blocks that rules name; blocks with the same code share one listing."""
    specs = {rule.fqn: rule.spec for rule in rules if isinstance(rule.spec, ChunkBlock)}
    wanted = [call for call in step.step().calls if call.fqn in specs]
    found: dict[tuple[Any, ChunkBlock], tuple[str, dict[str, None]]] = {}
    for call, capture in zip(wanted, _captured(step.module, wanted), strict=True):
        assert not isinstance(capture, str), "a rule of chunk is for a block that can be captured"
        key = capture.graph, (spec := specs[call.fqn])
        if key not in found:
            costs = spec.costs(step.operator_rates())
            with call.precision():
                found[key] = plan_graph(capture, spec.budget_bytes, train=True, costs=costs).chunks.code[""], {}
        found[key][1][call.fqn] = None
    return "\n\n\n".join(f"# {', '.join(names)}\n{text}" for text, names in found.values())
