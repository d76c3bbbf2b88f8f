"""Check that planner inputs are equal on all ranks: the options, the plan's file, and the data on disk.

Compared once, in `setup`, before anything is installed: one all-gather of small objects. Paths,
memory and rates are left out, for machines may differ in them, and so is the batch size, for ranks may have unequal
numbers of cells; rank 0's count.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, is_dataclass
from typing import Any

import torch.distributed as dist

from lightning_amp.errors import AmpError, PlanError
from lightning_amp.lightning.strategy.hardware import ThisRank
from lightning_amp.lightning.strategy.request import Request
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.profiling.read_profile import profile as read_profile

SHOWN = 8
"""Differences that are spelled out."""
OF_THE_MACHINE = ("data_dir", "budget_bytes")
COMPARED = (
    *("policy", "strategies", "model_parallel_size", "share_batch_statistics", "balance_cells"),
    *("blocks", "fsdp_ranks", "fsdp_offload", "device_speeds"),
)


def facts_of_plan(request: Request, data: Any) -> dict[str, str]:
    """Everything that decides the plan, by name, as this rank sees it; `data` is the data module or None."""
    found: dict[str, Any] = {name: getattr(request, name) for name in COMPARED}
    try:
        if (asked := request.plan) is not None:
            found["plan"] = json.loads((asked if isinstance(asked, Plan) else Plan.read(asked)).to_json())
        if (data_dir := request.data_dir_or(data)) is not None:
            read = read_profile(data_dir, setting=getattr(data, "setting", None))
            found["data"] = {"modality": {m.name: asdict(m) for m in read.modalities}, "graph": read.graph}
    except AmpError as error:
        found["error"] = str(error)
    return {name: value for name, value in _flat(found) if name.rpartition(".")[2] not in OF_THE_MACHINE}


def make_sure_of_same_plan(request: Request, here: ThisRank, data: Any) -> None:
    """Compare with rank 0; a collective, after which all ranks go on or none.

    Raises:
        PlanError: Another rank's facts differ; on all ranks, with the same text.
    """
    if here.n_ranks == 1:
        return
    everyones: list[Any] = [None] * here.n_ranks
    dist.all_gather_object(everyones, facts_of_plan(request, data))
    found = [_difference(everyones[0], facts, rank=rank) for rank, facts in enumerate(everyones)]
    differing = [(rank, lines) for rank, lines in enumerate(found) if lines]
    if differing:
        other, lines = differing[0]
        more = f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
        raise PlanError(
            f"the same plan is needed on all {here.n_ranks} ranks, and {len(differing)} of them see something else than"
            f" rank 0, first rank {other}: {'; '.join(lines[:SHOWN])}{more}. Give all ranks the same options and the"
            " same data"
        )


def _difference(first: dict[str, str], mine: dict[str, str], *, rank: int) -> list[str]:
    names = sorted({*first, *mine})
    return [
        f"{name} is {first.get(name, 'missing')} on rank 0 and {mine.get(name, 'missing')} on rank {rank}"
        for name in names
        if first.get(name) != mine.get(name)
    ]


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _flat(part, f"{name}.{key}" if name else str(key))
    else:
        yield name, repr(value)
