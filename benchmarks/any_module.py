"""Modules that nobody wrote for lightning_amp, trained by `strategy="amp"` under a budget, beside what else one can do.

    python -m benchmarks.any_module [--quick] [--only NAME ...] [--write]

`budgets`: every module of examples/any_module, unedited, with 75, 50 and 30 % of the bytes that a plain step takes, on
1, 2 and 4 ranks: the plan, its predicted peak beside the meter's in the second step of a real run, and how far the
parameters are from those of plain Lightning (one rank) or ddp after 3 steps in float64, same draws, as a share of the
largest; or what the refusal says. `peers`: peak and time of the same modules, with more samples, on 2 ranks, for ddp,
for FSDP2 and recomputed blocks written by hand, and for amp; with the lines that a person writes for each.

A run is a new process, or one for each rank, of one thread. Bytes are exact; times are medians of steps, in rounds that
take turns. `--write` puts the tables into docs/any_module.md. Modules whose packages are not there are left out, and
named. About 40 minutes on two quiet cores, with --quick 6.
"""

import argparse
import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.page import ROOT, origin, paragraph, read_part, write_part
from benchmarks.page import table as markdown
from lightning_amp.progress import track
from lightning_amp.quantities import format_bytes, format_seconds

PAGE, PART = ROOT / "docs" / "any_module.md", "any_module"
NAMES = ("gene_transformer", "geneformer", "gpt2", "vit", "unet", "evoformer", "wide_mlp", "cnn")
QUICK = ("gene_transformer", "evoformer", "wide_mlp")
SHARES, RANKS = (0.75, 0.5, 0.3), (1, 2, 4)
STEPS = 3
TIMED = 12
ROUNDS = 2
SAMPLES = {"evoformer": 4, "unet": 8, "vit": 8}
"""Rows of the batch over all ranks in `budgets`; 8 elsewhere."""
LARGE: dict[str, dict[str, int]] = {
    "gene_transformer": {"cells": 16, "length": 512},
    "geneformer": {"cells": 16, "length": 256},
    "gpt2": {"texts": 16, "length": 128},
    "vit": {"images": 16},
    "unet": {"images": 16, "side": 64},
    "evoformer": {"samples": 4, "side": 64},
    "wide_mlp": {"cells": 64},
    "cnn": {"samples": 32, "length": 2048},
}
"""Sizes of `peers`, at which products take longer than Python."""


# What a person would write: the body of each function is counted as its lines of code.


def checkpoint_by_hand(module: Any) -> None:
    """Recompute every block in the backward pass."""
    from torch.utils.checkpoint import checkpoint

    for block in blocks_of(module):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def shard_by_hand(module: Any) -> None:
    """FSDP2: every block, then the whole module."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    def configure_model() -> None:
        mesh = module.device_mesh["data_parallel"]
        for block in blocks_of(module):
            fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)
        register_fsdp_forward_method(module, "training_step")

    module.configure_model = configure_model


def both_by_hand(module: Any) -> None:
    """FSDP2 with recomputed blocks."""
    checkpoint_by_hand(module)
    shard_by_hand(module)


BY_HAND: dict[str, Callable[[Any], None]] = {
    "recompute": checkpoint_by_hand,
    "fsdp2": shard_by_hand,
    "both": both_by_hand,
}
PEERS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp_find_unused_parameters_true"},
    "ddp, blocks recomputed by hand": {
        "strategy": "ddp_find_unused_parameters_true",
        "by_hand": "recompute",
    },
    "FSDP2 by hand": {"strategy": "fsdp2", "by_hand": "fsdp2"},
    "FSDP2, blocks recomputed by hand": {"strategy": "fsdp2", "by_hand": "both"},
    "amp": {"strategy": {}},
    "amp, 50 % of ddp's peak": {"strategy": {}, "share": 0.5},
}


def blocks_of(module: Any) -> list[Any]:
    """What a person would wrap: the members of the module's lists."""
    from lightning_amp.footprint.find_blocks import find_blocks

    return [block for block in find_blocks(module).values() if any(True for _ in block.parameters())]


# One run, in a process of its own.


def fit(request: dict[str, Any]) -> None:
    """Train in this process; rank 0 writes what was found, every rank its peak."""
    import torch
    from lightning.pytorch import seed_everything

    from tests.any_module import load, make

    torch.set_num_threads(1)
    seed_everything(0, verbose=False)
    # the same weights in every run: `make` sets the seed
    module, _ = make(request["name"])
    if request["double"]:
        module = module.double()
    if request.get("by_hand"):
        BY_HAND[request["by_hand"]](module)
    batch = load(request["name"]).make_batch(**request["sizes"])
    rows = rows_of(batch, double=request["double"])
    torch.manual_seed(1)
    trainer, probe = _trainer(request)
    loader = torch.utils.data.DataLoader(
        rows * (request["steps"] + 1), batch_size=len(rows) // request["ranks"], shuffle=False
    )
    refused = ""
    try:
        trainer.fit(module, loader)
    except Exception as error:
        refused = f"{type(error).__name__}: {error}"
    _write(request, trainer, module, probe, refused)


def rows_of(batch: Any, *, double: bool) -> list[Any]:
    """The rows of a batch, which a loader puts together again."""
    import torch

    from lightning_amp._torch import tree_flatten, tree_unflatten

    leaves, spec = tree_flatten(batch)
    leaves = [x.double() if double and x.is_floating_point() else x for x in leaves]
    assert all(isinstance(x, torch.Tensor) for x in leaves), "the examples' batches hold tensors only"
    return [tree_unflatten([x[i] for x in leaves], spec) for i in range(len(leaves[0]))]


def _trainer(request: dict[str, Any]) -> tuple[Any, Any]:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy

    import lightning_amp
    from tests.any_module import Meter

    class Probe(Meter):
        """Counts the second step, or notes when batches end."""

        def __init__(self) -> None:
            super().__init__()
            self.ends = list[float]()

        def on_train_batch_start(self, *about: Any) -> None:
            if request["meter"]:
                super().on_train_batch_start(*about)

        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            self.ends.append(time.perf_counter())
            if request["meter"]:
                super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)
            if len(self.ends) > request["steps"]:
                trainer.should_stop = True

    asked, probe = request["strategy"], Probe()
    strategy = lightning_amp.AMPStrategy(**asked) if isinstance(asked, dict) else asked
    if asked == "fsdp2":
        strategy = ModelParallelStrategy(data_parallel_size=request["ranks"], tensor_parallel_size=1)
    trainer = Trainer(
        strategy=strategy,
        devices=request["ranks"],
        accelerator="cpu",
        max_steps=-1,
        max_epochs=1,
        limit_train_batches=request["steps"],
        callbacks=[probe],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=True,
    )
    return trainer, probe


def _write(request: dict[str, Any], trainer: Any, module: Any, probe: Any, refused: str) -> None:
    import torch

    plan, rank = getattr(trainer.strategy, "plan", None), trainer.global_rank
    steps = [b - a for a, b in zip(probe.ends, probe.ends[1:], strict=False)]
    found = {
        "peak": probe.live.peak,
        "step": median(steps[len(steps) // 3 :]) if steps else None,
        "refused": refused,
        "plan": "" if plan is None else ",".join(plan.strategies),
        "predicted": None if plan is None else plan.predicted_peak_bytes,
        "diagnosis": getattr(getattr(plan, "diagnosis", None), "largest", ""),
    }
    Path(f"{request['out']}.{rank}").write_text(json.dumps(found))
    if rank == 0 and request["double"] and not refused:
        torch.save({n: p.detach().clone() for n, p in module.named_parameters()}, f"{request['out']}.pt")


# Many runs.


def run(name: str, *, folder: Path, ranks: int, sizes: dict[str, int], **wanted: Any) -> dict[str, Any]:
    """One run: what rank 0 found, with the largest peak of all ranks."""
    out = Path(tempfile.mkdtemp(dir=folder)) / "found"
    request = {"name": name, "ranks": ranks, "sizes": sizes, "out": str(out), "steps": STEPS}
    request |= {"meter": False, "double": False, **wanted}
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    command = [sys.executable, "-m", "benchmarks.any_module", "--one", json.dumps(request)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    files = [Path(f"{out}.{rank}") for rank in range(ranks)]
    if done.returncode or not files[0].exists():
        # a row that failed is in the table, and the others are measured
        print(f"{name} with {wanted!r} ended with {done.returncode}:\n{done.stderr[-3000:]}", file=sys.stderr)
        last = done.stderr.strip().splitlines()[-1:] or ["nothing printed"]
        return {"refused": f"FAILED: {last[0]}", "peak": 0, "plan": "", "predicted": None, "step": None}
    found = [json.loads(file.read_text()) for file in files if file.exists()]
    parameters = Path(f"{out}.pt")
    return {**found[0], "peak": max(f["peak"] for f in found), "parameters": parameters}


def difference(one: Path, other: Path) -> float:
    """Largest difference of parameters, as a share of the largest value."""
    import torch

    a, b = torch.load(one), torch.load(other)
    assert a.keys() == b.keys(), f"parameters {sorted(a.keys() ^ b.keys())} are on one side only"
    return max(float((a[n] - b[n]).abs().max()) for n in a) / max(float(p.abs().max()) for p in a.values())


def budget_rows(names: list[str], folder: Path, *, quick: bool) -> Iterator[list[str]]:
    """The table `budgets`."""
    ranks_of = RANKS[:2] if quick else RANKS
    todo = [(name, ranks) for name in names for ranks in ranks_of]
    for name, ranks in track(todo, description="budgets", total=len(todo)):
        sizes = {_rows_name(name): SAMPLES.get(name, 8)}
        plain = "auto" if ranks == 1 else "ddp_find_unused_parameters_true"
        common: dict[str, Any] = {"folder": folder, "ranks": ranks, "sizes": sizes}
        eager = run(name, strategy=plain, meter=True, **common)
        exact = run(name, strategy=plain, double=True, **common)
        for share in SHARES:
            asked = {"device_memory": int(share * eager["peak"])}
            got = run(name, strategy=asked, meter=True, **common)
            # in float64 the same plan needs twice the bytes
            own = {"strategies": got["plan"] or "S1", "share_batch_statistics": False, "unfit": "train"}
            same = None if got["refused"] else run(name, strategy=own, double=True, **common)
            yield _budget_row(name, ranks, share, eager, exact, got, same)


def _budget_row(
    name: str,
    ranks: int,
    share: float,
    eager: dict[str, Any],
    exact: dict[str, Any],
    got: dict[str, Any],
    same: dict[str, Any] | None,
) -> list[str]:
    head = [name, f"{ranks}", f"{share:.0%} of {format_bytes(eager['peak'])}"]
    if same is None:
        return [*head, "refused", got["refused"].split(". ")[0].replace("|", "/"), "", ""]
    away = difference(same["parameters"], exact["parameters"])
    ratio = got["predicted"] / got["peak"] if got["peak"] and got["predicted"] else float("nan")
    within = "" if got["peak"] <= share * eager["peak"] else " **above**"
    return [
        *head,
        got["plan"] or "none",
        f"{format_bytes(got['peak'])}{within}",
        f"{ratio:.3f}",
        f"{away:.1e}",
    ]


def peer_rows(names: list[str], folder: Path, *, quick: bool) -> Iterator[list[str]]:
    """The table `peers`."""
    for name in names:
        common: dict[str, Any] = {"folder": folder, "ranks": 2, "sizes": LARGE[name]}
        peaks: dict[str, dict[str, Any]] = {}
        asked: dict[str, dict[str, Any]] = {}
        for peer, wanted in PEERS.items():
            options = dict(wanted)
            share = options.pop("share", None)
            if share:
                options["strategy"] = {"device_memory": int(share * peaks["ddp"]["peak"])}
            asked[peer] = options
            peaks[peer] = run(name, meter=True, **options, **common)
        rounds = 1 if quick else ROUNDS
        turns = [peer for _ in range(rounds) for peer in PEERS if not peaks[peer]["refused"]]
        seconds: dict[str, list[float]] = {peer: [] for peer in turns}
        for peer in track(turns, description=name, total=len(turns)):
            seconds[peer].append(run(name, steps=TIMED, **asked[peer], **common)["step"])
        first = median(seconds["ddp"])
        for peer, found in peaks.items():
            lines = str(lines_of(PEERS[peer].get("by_hand")))
            if found["refused"]:
                yield [name, peer, "", "", "", found["refused"].split(". ")[0].replace("|", "/"), lines]
                continue
            step = median(seconds[peer])
            share = found["peak"] / peaks["ddp"]["peak"]
            took = [format_seconds(step), f"{step / first:.2f}"]
            yield [name, peer, f"{format_bytes(found['peak'])} ({share:.0%})", *took, found["plan"], lines]


def lines_of(by_hand: str | None) -> int:
    """Lines that a person writes, beside the Trainer's `strategy=`."""
    if by_hand == "both":
        return lines_of("recompute") + lines_of("fsdp2")
    if by_hand is None:
        return 0
    source = inspect.getsource(BY_HAND[by_hand]).splitlines()[2:]
    return sum(bool(line.strip()) for line in source)


def _rows_name(name: str) -> str:
    return next(iter(LARGE[name]))


def available(names: list[str]) -> tuple[list[str], list[str]]:
    """Names whose packages are there, and the others."""
    from importlib.util import find_spec

    files = {name: (ROOT / "examples" / "any_module" / f"{name}.py").read_text() for name in names}
    absent = [name for name in names if "transformers" in files[name] and find_spec("transformers") is None]
    return [name for name in names if name not in absent], absent


BUDGETS = ["module", "ranks", "budget", "plan", "peak by the meter", "predicted / peak", "difference"]
PEERS_HEADER = ["module", "by", "peak", "step", "ratio", "plan", "lines of code"]


def tables(names: list[str], *, quick: bool) -> Iterator[list[str]]:
    """The page's part, whole again and again as tables grow."""
    command = f"python -m benchmarks.any_module --write{' --quick' * quick}"
    lines = [*paragraph(f"{origin(command)} Bytes of the second step; the most of any rank.")]
    with tempfile.TemporaryDirectory() as folder:
        for title, header, rows in (
            # times first, for what is exact may be counted while the machine does something else
            ("Beside peers, two ranks", PEERS_HEADER, peer_rows),
            ("Budgets", BUDGETS, budget_rows),
        ):
            done: list[list[str]] = []
            for row in rows(names, Path(folder), quick=quick):
                done.append(row)
                yield [*lines, f"### {title}", "", *markdown(header, done)]
            lines += [f"### {title}", "", *markdown(header, done)]


def main() -> None:
    """Measure, and print or write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="three modules, two ranks at most, one round")
    parser.add_argument("--only", nargs="+", choices=NAMES, help="these modules")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/any_module.md")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        fit(json.loads(arguments.one))
        return
    names, absent = available(arguments.only or list(QUICK if arguments.quick else NAMES))
    if absent:
        print(f"left out, for they need the package transformers: {', '.join(absent)}")
    if arguments.write:
        read_part(PAGE, PART)  # a page without markers is refused before anything is measured
    lines: list[str] = []
    for lines in tables(names, quick=arguments.quick):
        if arguments.write:
            write_part(PAGE, PART, lines)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
