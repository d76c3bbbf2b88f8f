"""Techniques of any LightningModule on one device: the losses and the parameters of a short fit against a plain one.

The plain fit is a loop without Lightning in float64 on the CPU. `recompute` trains the same numbers up to rounding, and
`lightning_amp.chunk` returns them. `fsdp` and `pipeline` are refused on one rank; what fsdp does is done there without
the Trainer, by NCCL on CUDA: parameters are gathered, and gradients reduced, over a mesh of one, and once more with a
rank's rows in the host's memory. A rescue is shown where memory really ends: the allocator is forbidden to take as much
as the plain step needs, and torch raises its OutOfMemoryError. On a CPU a budget stands for it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import inf
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lightning_amp
from benchmarks.gpu.runner import Work, first_line
from benchmarks.gpu.trainer import BACKENDS, trainer_for
from lightning_amp.errors import AmpError
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.techniques.contract.sharded_parameter import local
from lightning_amp.techniques.fsdp.fully_sharded import FullySharded

STEPS = 3
ALLOWED = {"64-true": 1e-10, "32-true": 1e-4}
"""Relative errors that are rounding."""
CHOICES = (("S1",), ("S1", "recompute"), ("S1", "host_optimizer"), ("S1", "host_optimizer", "early_update"))
LEARNING_RATE = 0.05
Found = dict[str, Tensor]


class Blocks(pl.LightningModule):
    """Residual blocks that draw nothing.

    Args:
        width: Channels.
        depth: Blocks.
        rows: Of the batch, [row, channel].
    """

    def __init__(self, *, width: int, depth: int, rows: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(depth)
        )
        self.double()
        generator = torch.Generator().manual_seed(1)
        self.data = [torch.randn(rows, width, dtype=torch.float64, generator=generator) for _ in range(STEPS)]
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """[row, channel] -> the same."""
        for block in self.blocks:
            x = x + block(x)
        return x

    def training_step(self, batch: Tensor, batch_idx: int = 0) -> Tensor:
        """Mean squared error."""
        loss = F.mse_loss(self(batch), batch.flip(0))
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Descent, so that an error in a gradient is one in a parameter; momentum is a state."""
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE, momentum=0.5)


def run(work: Work) -> None:
    """A row for each technique and precision, and one for each of the others."""
    sizes = {"width": 8, "depth": 3, "rows": 32} if work.tiny else {"width": 256, "depth": 12, "rows": 2**14}
    few = sizes | {"rows": min(sizes["rows"], 512)}
    expected, wrong = _plain(Blocks(**few)), 0
    for precision in ALLOWED:
        # gradients of tiny sizes are one bucket, which early_update cannot divide
        for strategies in CHOICES[:-1] if work.tiny else CHOICES:
            fit = partial(_fit, work, strategies, precision, few)
            wrong += _case(work, ",".join(strategies), precision, expected, lambda fit=fit: fit()[0])
        for offload in (False, True):
            name = f"fsdp over a mesh of one{', rows on the host' if offload else ''}"
            train = partial(_sharded, work, precision, few, offload=offload)
            wrong += _case(work, name, precision, expected, train)
    wrong += _chunked(work, few) + _rescued(work, sizes)
    wrong += _refused(work, "pipeline", few) + _refused(work, "fsdp", few)
    if wrong:
        raise AssertionError(f"{wrong} of the rows have failed, or are wrong by more than rounding")


def _case(work: Work, name: str, precision: str, expected: Found, find: Callable[[], Found]) -> int:
    """A row of what is found, or of how it fails; 1 where it is wrong."""
    try:
        found = find()
    except Exception as error:
        # one that cannot run hides nothing of the others
        most, answer, said = None, "**failed**", first_line(error)
    else:
        most = max(_error(found.get(key), right) for key, right in expected.items())
        answer, said = "exact" if most <= ALLOWED[precision] else "**wrong**", ""
    work.record.row(technique=name, precision=precision, largest_error=most, answer=answer, said=said)
    return int(answer != "exact")


def _error(found: Tensor | None, right: Tensor) -> float:
    """Relative to the norm of what is right; infinite where something is missing or not a number."""
    error = inf if found is None else float((found - right).norm() / right.norm().clamp(min=1e-12))
    return error if error == error else inf


def _plain(module: Blocks) -> Found:
    optimizer = module.configure_optimizers()
    for batch in module.data:
        optimizer.zero_grad()
        module.training_step(batch).backward()
        optimizer.step()
    return _values(module)


def _values(module: Blocks) -> Found:
    """Losses and parameters in the host's memory and double precision."""
    losses = {f"loss {i}": loss for i, loss in enumerate(module.losses[-STEPS:])}
    return {name: value.detach().double().cpu() for name, value in (losses | module.state_dict()).items()}


def _fit(
    work: Work, strategies: tuple[str, ...] | None, precision: str, sizes: Mapping[str, int], **amp: Any
) -> tuple[Found, AMPStrategy]:
    # with 32-true Lightning leaves a module's type, and its batch's, as they are
    dtype = torch.float64 if precision == "64-true" else torch.float32
    module = Blocks(**sizes).to(dtype)
    loader: Any = DataLoader([batch.to(dtype) for batch in module.data], batch_size=None)  # type: ignore[arg-type]
    trainer, strategy = trainer_for(work, strategies=strategies, steps=STEPS, amp=amp, precision=precision)
    trainer.fit(module, loader)
    return _values(module), strategy


def _chunked(work: Work, sizes: Mapping[str, int]) -> int:
    """`lightning_amp.chunk` under half of what a block's widest tensors take, without a Trainer."""
    module = Blocks(**sizes)
    x = module.data[0]
    with torch.no_grad():
        expected = {"output": module(x)}
        own, there = module.to(work.device), x.to(work.device)
        chunked = partial(lightning_amp.chunk, own, there, budget=4 * x.nbytes)
        return _case(work, "chunk(module, x)", "64-true", expected, lambda: {"output": chunked()(there).cpu()})


def _sharded(work: Work, precision: str, sizes: Mapping[str, int], *, offload: bool) -> Found:
    """Parameters by rows over a process group of one rank, of the backend that several have."""
    dtype = torch.float64 if precision == "64-true" else torch.float32
    with _group(work.device) as mesh:
        return _train_sharded(Blocks(**sizes).to(work.device, dtype), mesh, offload=offload)


def _train_sharded(module: Blocks, mesh: DeviceMesh, *, offload: bool) -> Found:
    first = next(module.parameters())
    batches = [batch.to(first.device, first.dtype) for batch in module.data]
    sharded = FullySharded(module, ["blocks.*", ""], mesh["data"], offload=offload)
    optimizer = module.configure_optimizers()
    for batch in batches:
        optimizer.zero_grad()
        loss = module.training_step(batch)
        with sharded.backward(loss):
            loss.backward()
        sharded.before_update()
        optimizer.step()
        sharded.after_update()
    places = {local(parameter.shard).device for parameter in sharded.sharded}
    assert not offload or places == {torch.device("cpu")}, f"rows lie on {places!r}"
    for parameter in sharded.sharded:
        parameter.restore()
    sharded.undo()
    return _values(module)


@contextmanager
def _group(device: torch.device) -> Iterator[DeviceMesh]:
    if not dist.is_initialized():
        # the Trainer of a fit before has left its own, which is the same
        dist.init_process_group(BACKENDS[device.type], store=dist.HashStore(), rank=0, world_size=1)
    assert dist.get_backend() == BACKENDS[device.type], "ranks on this device have this backend"
    yield init_device_mesh(device.type, (1,), mesh_dim_names=("data",))


def _refused(work: Work, strategy: str, sizes: Mapping[str, int]) -> int:
    """What needs ranks says so on one rank, before anything is changed."""
    answer, said = "**wrong**", "it was not refused"
    try:
        _fit(work, ("S1", strategy), "32-true", sizes)
    except AmpError as error:
        answer, said = "refused", first_line(error)
    except Exception as error:
        said = first_line(error)
    work.record.row(technique=f"{strategy} on one rank", answer=answer, said=said)
    return int(answer != "refused")


def _rescued(work: Work, sizes: Mapping[str, int]) -> int:
    """A fit whose first batch has no memory, next to one that has it."""
    expected, plain = _fit_with_peak(work, ("S1",), sizes)
    budget = (plain + _fit_with_peak(work, ("S1", "recompute"), sizes)[1]) // 2
    cuda = work.device.type == "cuda"
    amp = {"rescue": True} | ({} if cuda else {"device_memory": f"{budget / 2**20}MiB"})

    def rescued() -> Found:
        with _at_most(work.device, budget):
            found, strategy = _fit(work, ("S1",), "32-true", sizes, **amp)
        assert strategy.plan is not None, "there is a plan after a fit"
        planned = strategy.plan.strategies
        assert planned != ("S1",), f"memory did not end with {budget} bytes, where {plain} had been taken"
        work.record.note(f"The rescue took {','.join(planned)}.")
        return found

    return _case(work, "rescue", "32-true", expected, rescued)


def _fit_with_peak(work: Work, strategies: tuple[str, ...], sizes: Mapping[str, int]) -> tuple[Found, int]:
    """What a fit leaves, and the most bytes that the allocator has taken; on a CPU those that were predicted."""
    if work.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(work.device)
    found, strategy = _fit(work, strategies, "32-true", sizes)
    if work.device.type == "cuda":
        return found, int(torch.cuda.max_memory_reserved(work.device))
    assert strategy.plan is not None, "there is a plan after a fit"
    return found, strategy.plan.predicted_peak_bytes


@contextmanager
def _at_most(device: torch.device, n_bytes: int) -> Iterator[None]:
    """Let torch's allocator take no more of a CUDA device, so that memory ends as on a smaller one."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(n_bytes / total, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
