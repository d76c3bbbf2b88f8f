"""Least bytes of modules whose parts are attributes, by torch's own MemTracker, with the lines of code that each takes.

    python -m benchmarks.any_module.attributes [--only NAME ...] [--write]

The modules of benchmarks/replay/models.py, on one device: a plain step, FSDP2 with a checkpoint around every module
by hand, `activation_memory_budget` of torch.compile's partitioner, and amp with the fewest bytes that it finds and with
blocks that are named. The second step is measured by torch.distributed._tools.mem_tracker. Compiled code does not run
where operators are looked at, and is measured by the allocator; hooks of the MemTracker read what every module returns,
which makes logits whole that `logits` computes in chunks: such a fit is measured by the library's meter. About five
minutes. `--write` puts the table into docs/reports/any_module.md.
"""

import argparse
import inspect
import multiprocessing
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import nn

from benchmarks.chunks.measure import memory_profile, most_allocated
from benchmarks.page import ROOT, origin, paragraph, table, write_part
from benchmarks.replay.models import MODELS
from benchmarks.training.whole_step import QUIET
from lightning_amp import AMPStrategy
from lightning_amp.quantities import format_bytes
from tests.any_module import Meter
from tests.techniques.replay.models import Residual, Rotary

HEADER = ["module", "by", "peak", "share of plain", "lines of code"]
SHARES = (0.5, 0.0)
"""Settings of `activation_memory_budget`; the better one is in the table."""
BLOCKS: dict[str, list[type]] = {"U-Net": [Residual], "ResNet": [Residual], "Llama": [Rotary]}
Peak = Callable[[str], int]


def modules_of(module: nn.Module) -> list[nn.Module]:
    """What a person would wrap: the outermost modules with parameters that are no lists or sequences."""
    found = list[nn.Module]()
    for child in module.children():
        inside = isinstance(child, nn.ModuleList | nn.Sequential)
        found += modules_of(child) if inside else [child] if any(True for _ in child.parameters()) else []
    return found


def checkpoint_and_shard(module: nn.Module) -> None:
    """FSDP2 and a checkpoint, module by module; the body is what a person writes."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
    from torch.utils.checkpoint import checkpoint

    for part in modules_of(module):
        part.forward = partial(checkpoint, part.forward, use_reentrant=False)
        fully_shard(part)
    fully_shard(module)
    register_fsdp_forward_method(module, "loss")


def tracked(module: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
    """A MemTracker that is about to count a step."""
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker.track_external(module, optimizer, batch)
    return tracker


def peak_of(tracker: Any) -> int:
    """Most bytes that it has counted."""
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def made(name: str) -> tuple[Any, Any]:
    """The module and a batch."""
    torch.manual_seed(0)
    make, batches = MODELS[name]
    return make(), batches(1)


def step(module: Any, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    """A step as Lightning runs it."""

    def closure() -> Any:
        loss = module.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        return loss

    optimizer.step(closure)


def plain(name: str) -> int:
    """Without anything."""
    module, batch = made(name)
    optimizer = module.configure_optimizers()
    step(module, optimizer, batch)
    with tracked(module, optimizer, batch) as tracker:
        step(module, optimizer, batch)
    return peak_of(tracker)


def fsdp2(name: str) -> int:
    """FSDP2 and checkpoints by hand, on one rank."""
    with tempfile.NamedTemporaryFile() as file:
        torch.distributed.init_process_group("gloo", f"file://{file.name}", rank=0, world_size=1)
        module, batch = made(name)
        checkpoint_and_shard(module)
        optimizer = module.configure_optimizers()
        step(module, optimizer, batch)
        with tracked(module, optimizer, batch) as tracker:
            step(module, optimizer, batch)
    return peak_of(tracker)


def keep_a_share(module: Any, share: float) -> None:
    """Let torch.compile's partitioner keep a share of the activations; the body is what a person writes."""
    import torch._functorch.config

    torch._functorch.config.activation_memory_budget = share
    module.loss = torch.compile(module.loss, backend="aot_eager_decomp_partition")


def partitioned(name: str, share: float) -> int:
    """A compiled loss, by the allocator."""
    module, batch = made(name)
    keep_a_share(module, share)
    optimizer = module.configure_optimizers()
    step(module, optimizer, batch)
    state = [x for values in optimizer.state.values() for x in values.values()]
    held = [batch, *module.parameters(), *(p.grad for p in module.parameters()), *module.buffers(), *state]
    with memory_profile() as profile:
        step(module, optimizer, batch)
    return sum(x.nbytes for x in held if x is not None) + most_allocated(profile)


def amp(name: str, **options: Any) -> int:
    """A fit of two steps."""
    module, batch = made(name)
    found, meter = list[Any](), Meter()

    class Tracked(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if "logits" in trainer.strategy.plan.strategies:
                meter.on_train_batch_start(trainer, module, batch, batch_idx)
            elif batch_idx == 1:
                found.append(tracked(module, trainer.optimizers[0], batch))
                found[0].__enter__()

        def on_train_batch_end(self, trainer: Any, module: Any, out: Any, batch: Any, batch_idx: int) -> None:
            if not found:
                meter.on_train_batch_end(trainer, module, out, batch, batch_idx)
            elif batch_idx == 1:
                found[0].__exit__(None, None, None)

    trainer = Trainer(
        strategy=AMPStrategy(device_memory="1KiB", on_predicted_oom="warn", **options),
        max_epochs=1,
        callbacks=[Tracked()],
        accelerator="cpu",
        devices=1,
        **QUIET,
    )
    trainer.fit(module, torch.utils.data.DataLoader(torch.cat([batch] * 2), len(batch)))
    return peak_of(found[0]) if found else meter.live.peak


def lines_of(written: Callable[..., Any]) -> int:
    """Of the body of a function, which has a docstring of one line."""
    return sum(bool(line.strip()) for line in inspect.getsource(written).splitlines()[2:])


def rows(names: list[str]) -> Iterator[list[str]]:
    """A row for every module and way; each runs in a fork of its own."""
    forks = multiprocessing.get_context("fork")

    def run(peak: Callable[..., int], *given: Any, **options: Any) -> int | str:
        with forks.Pool(1, maxtasksperchild=1) as pool:
            try:
                return pool.apply(peak, given, options)
            except Exception as error:
                return f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"

    for name in names:
        whole = run(plain, name)
        assert isinstance(whole, int), whole
        budgets = [run(partitioned, name, share) for share in SHARES]
        least = min((one for one in budgets if isinstance(one, int)), default=budgets[0])
        ways: dict[str, tuple[int | str, int]] = {
            "plain": (whole, 0),
            "FSDP2 and a checkpoint for each module, by hand": (run(fsdp2, name), lines_of(checkpoint_and_shard)),
            "activation_memory_budget": (least, lines_of(keep_a_share)),
            "amp, least": (run(amp, name), 1),
        }
        if name in BLOCKS:
            kind = BLOCKS[name][0].__name__
            found = run(amp, name, strategies="recompute", blocks=BLOCKS[name])
            ways[f"amp, recompute with blocks=[{kind}]"] = found, 1
        for way, (peak, lines) in ways.items():
            cells = [peak, ""] if isinstance(peak, str) else [format_bytes(peak), f"{peak / whole:.0%}"]
            yield [name, way, *cells, str(lines)]


def main() -> None:
    """Measure, and print or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--write", action="store_true", help="put the table into docs/reports/any_module.md")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    done = list(rows(asked.only))
    text = f"{origin('python -m benchmarks.any_module.attributes --write')} Bytes of the second step."
    lines = [*paragraph(text), *table(HEADER, done)]
    if asked.write:
        write_part(Path(ROOT / "docs" / "reports" / "any_module.md"), "any_module.attributes", lines)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
