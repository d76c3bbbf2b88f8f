"""Capture the blocks that a step has called as tables, in which planning looks for chunks, and as code to run."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from lightning_amp.footprint.chain.block_call import BlockCall
from lightning_amp.footprint.copies.fake_copy import copy_of
from lightning_amp.footprint.copies.quick_fakes import QuickFakes
from lightning_amp.graph.after_blocks import AfterBlocks
from lightning_amp.graph.capture import Capture, Captures
from lightning_amp.graph.table import Table
from lightning_amp.techniques.chunk.run.lower import table_of
from lightning_amp.techniques.chunk.run.module_chunks import plain
from lightning_amp.techniques.chunk.run.planned import plan_graph
from lightning_amp.techniques.contract.batch_norms import normalises_by_batch


def block_tables(module: nn.Module, calls: Sequence[BlockCall], *, shared: bool = False) -> list[Table | str]:
    """For every call the table that a rule of `chunk` would be planned by, or why there is none.

    Calls of one class and signature share one table, and so do blocks that differ in nothing that a table has, such as
    their number in a list.

    Args:
        module: Whose blocks they are.
        calls: Of a step.
        shared: Whether ranks exchange the statistics of batches, which is no operator of a table.
    """
    known: dict[Any, Table | str] = {}
    same: dict[Table | str, Table | str] = {}
    found: list[Table | str] = []
    for capture in _captured(module, calls, shared=shared):
        if isinstance(capture, str):
            found.append(capture)
            continue
        if capture.key not in known:
            table = capture.reason or table_of(capture)
            known[capture.key] = same.setdefault(table, table)
        found.append(known[capture.key])
    return found


def block_code(module: nn.Module, calls: Sequence[BlockCall], budgets: Mapping[str, int]) -> dict[str, str]:
    """The forward that is generated for blocks in chunks in training, by the names of all that run the same.

    Args:
        module: Whose blocks they are.
        calls: Of a step.
        budgets: Bytes of a block's rule of `chunk`, by its name.
    """
    wanted = [call for call in calls if call.fqn in budgets]
    groups: dict[tuple[Any, int], list[str]] = {}
    code: dict[tuple[Any, int], str] = {}
    for call, capture in zip(wanted, _captured(module, wanted), strict=True):
        assert not isinstance(capture, str), "a rule of chunk is for a block that can be captured"
        key = capture.key, budgets[call.fqn]
        if key not in code:
            code[key] = plan_graph(capture, budgets[call.fqn], train=True).chunks.code[""]
        groups.setdefault(key, []).append(call.fqn)
    return {", ".join(dict.fromkeys(names)): code[key] for key, names in groups.items()}


def _captured(module: nn.Module, calls: Sequence[BlockCall], *, shared: bool = False) -> list[Capture | str]:
    """What became of every call, or why it was not looked at."""
    captures, fake = Captures(), QuickFakes()
    found: list[Capture | str] = []
    for call in calls:
        if call.sparse:
            found.append("it is called with a tensor that is not dense")
            continue
        block = module.get_submodule(call.fqn)
        if any(parameter.is_meta for parameter in block.parameters()):
            # it runs on the device of its arguments
            block = copy_of(block, fake)
        if call.before is not None:
            block = AfterBlocks(block, call.before)
        if shared and any(map(normalises_by_batch, block.modules())):
            found.append("ranks exchange the statistics of a BatchNorm in it (share_batch_statistics)")
            continue
        if any(getattr(child, "sparse", False) is True for child in block.modules()):
            found.append("an embedding in it has gradients that are not dense")
            continue
        args, kwargs = call.arguments(fake)
        with call.precision():
            found.append(captures.of(plain(block), args, kwargs))
    return found
