"""Four ranks in two groups of two, each of which splits all parameters; beside them one process, and two ranks."""

import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor

from lightning_amp.costs.device_rates import CPU_CORE
from lightning_amp.footprint.profile_module import profile_module
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.techniques.contract.sharded_parameter import local
from lightning_amp.techniques.fsdp.bytes_of_ranks import fsdp_peak_bytes
from lightning_amp.techniques.fsdp.look import units_of
from lightning_amp.techniques.fsdp.row import FullyShard
from tests.lightning.strategy import fsdp_cases
from tests.lightning.strategy.fsdp_features import Blocks, Found, Several, loader, saved, trained, trainer_of
from tests.lightning.strategy.strategy_cases import Batch, RunningRanks
from tests.ranks import CountCollectives
from tests.techniques.fsdp.test_fsdp_bytes import measured, module_and_batch

CELLS = [(3, 1, 2, 2), (1, 4, 1, 2), (2, 2, 2, 2), (4, 1, 1, 2), (1, 1, 2, 2), (2, 1, 1, 1), (3, 2, 1, 2)]
"""Of each rank, step by step; seven steps make a short last window of three."""
WAYS: dict[str, tuple[type[Blocks], dict[str, Any]]] = {
    "accumulated and clipped by norm": (Blocks, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.3}),
    "by hand": (Several, {}),
}
ONE = "epoch=0.ckpt"


def groups(**options: Any) -> AMPStrategy:
    return AMPStrategy(strategies="fsdp", fsdp_ranks=2, **options)


def batches(rank: int | None) -> list[Batch]:
    """A rank's part of every batch; all of it on one process."""
    generator, found = torch.Generator().manual_seed(5), []
    for cells in CELLS:
        x, y = (torch.randn(sum(cells), n, generator=generator, dtype=torch.float64) for n in (3, 1))
        start = 0 if rank is None else sum(cells[:rank])
        part = slice(start, sum(cells) if rank is None else start + cells[rank])
        found.append({"rna": {"x": x[part], "y": y[part]}})
    return found


def ways(rank: int | None, ranks: int) -> Found:
    found = {}
    for name, (kind, options) in WAYS.items():
        module = kind()
        trainer_of(rank or 0, ranks, groups(), **options).fit(module, loader(batches(rank)))
        found[name] = trained(module)
    # in single precision other operations divide the sums
    module = Blocks().float()
    data = [{"rna": {key: value.float() for key, value in batch["rna"].items()}} for batch in batches(rank)]
    trainer_of(rank or 0, ranks, groups(), precision="32-true", max_epochs=1).fit(module, loader(data))
    return found | {"single": trained(module)}


def cnn(rank: int, ranks: int) -> Found:
    module, data = fsdp_cases.module_of("cnn"), fsdp_cases.batches_of("cnn", rank, ranks)
    return fsdp_cases.fit(module, data, rank, ranks, fsdp_ranks=2)


class Counted(Callback):
    """Collectives of the third step, and the sizes of what this rank keeps."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.rows: dict[str, tuple[int, ...]] = {}

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self._mode = CountCollectives().__enter__()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self._mode.__exit__(None, None, None)
            self.counts = self._mode.counts
            self.rows = {name: tuple(local(p).shape) for name, p in module.named_parameters()}


class SkipsInOneGroup(Blocks):
    """The ranks of the second group leave a block out, alike."""

    def through(self, x: Tensor) -> Tensor:
        x = self.first(x)
        skipped = 1 if self.trainer.global_rank > 1 else None
        for k, block in enumerate(self.blocks):
            x = x if k == skipped else x + block(x)
        return x


class Drifts(Blocks):
    """Rank 3 changes its rows by itself, between steps."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_rank == 3 and self.trainer.global_step == 1:
            with torch.no_grad():
                local(self.blocks[0][0].bias).add_(0.1)


def told(rank: int, module: Blocks, strategy: AMPStrategy, **options: Any) -> str:
    """The error, or the warnings, of a short run."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer_of(rank, 4, strategy, max_epochs=1, **options).fit(module, loader(batches(rank)))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            dist.barrier()
    return " ".join(str(warning.message) for warning in caught)


class TwoNodes(RunningRanks):
    """Of two ranks each."""

    def local_rank(self) -> int:
        return self._rank % 2

    def node_rank(self) -> int:
        return self._rank // 2


def chosen(rank: int, folder: Path) -> FullyShard | None:
    """How policy "auto" splits on two nodes with slow links between them, within what half of everything takes."""
    module, batch = module_and_batch("stack")
    budget = int(1.01 * fsdp_peak_bytes(profile_module(module, batch), units_of(module), 2))
    links = replace(CPU_CORE.links, inter_bandwidth=1e7)
    (folder / f"rates{rank}.json").write_text(replace(CPU_CORE, links=links).to_json())
    strategy = AMPStrategy(device_memory=budget, rates=folder / f"rates{rank}.json")
    own: dict[str, Any] = {"devices": 2, "num_nodes": 2, "plugins": [TwoNodes(rank, 4)], "max_epochs": 1}
    trainer_of(rank, 4, strategy, **own).fit(module, loader([batch] * 2))
    assert strategy.plan is not None
    return next((rule.spec for rule in strategy.plan.rules if rule.strategy == "fsdp"), None)


def plain(rank: int, ranks: int, folder: Path) -> Found:
    """Everything on one process with plain Lightning."""
    warnings.simplefilter("ignore")
    return {"ways": ways(None, 1), "cnn": cnn(0, 1), "saved": saved(rank, 1, folder / "plain")}


def four(rank: int, ranks: int, folder: Path) -> Found:
    """In groups, with rows in the host's memory for the second epoch, and what is told."""
    warnings.simplefilter("ignore")
    found: Found = {
        "ways": ways(rank, 4),
        "cnn": cnn(rank, 4),
        "peak": measured(rank, 4, ("stack",), fsdp_ranks=2)["stack"],
        "saved": saved(rank, 4, folder / "groups", groups()),
        "chosen": chosen(rank, folder),
        "refused": told(rank, SkipsInOneGroup(), groups()),
        "three": told(rank, Blocks(), AMPStrategy(strategies="fsdp", fsdp_ranks=3)),
    }
    counts = Counted()
    found["drifts"] = told(rank, Drifts(), groups(), callbacks=[counts])
    found |= {"counts": dict(counts.counts), "rows": counts.rows}
    start, on_host = folder / "groups" / ONE, groups(fsdp_offload=True, save_distributed_checkpoint=True)
    found["on the host"] = saved(rank, 4, folder / "host", on_host, resume=start)
    assert on_host.plan is not None
    return found | {"notes": on_host.plan.notes}
