"""A decoder with a batch and an optimiser, in this process: what is measured.

A step is forward pass, backward pass and the reduction of gradients; these are timed. The optimiser's update follows.
The last step's gradients are dropped after the forward pass, as Lightning does. The latents of anchors are a parameter
that DDP and FSDP2 see and the optimiser does not: in a model they come from an encoder, and need their gradient.
"""

import time
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.decoders import Size
from benchmarks.side_by_side.cases import Case
from benchmarks.side_by_side.package_attention import use_package
from benchmarks.side_by_side.sent_bytes import sent_bytes
from lightning_amp.installing.install import install
from lightning_amp.models.decoders.stratified import StratifiedDecoder
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.techniques.data.gradient_sync import GradientSync

NONZERO = 0.02
"""Share of the counts that are not zero."""
LEARNING_RATE = 2e-3
LATENT_SCALE = 0.1


class Model(nn.Module):
    """A decoder and the latents of its anchors."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        shape = size.decoder()
        self.decoder = StratifiedDecoder(
            shape.dim,
            [range(n) for n in shape.features],
            stratum_index=shape.distances,
            n_anchors=shape.anchors,
            n_batches=1,
            window=shape.window,
        )
        self.v = nn.Parameter(torch.randn(shape.anchors, shape.dim))

    def forward(self, u: Tensor, **cells: Tensor) -> Tensor:
        """The loss."""
        loss: Tensor = self.decoder(u, self.v, **cells)
        return loss


class Training:
    """One rank's part of a case.

    Args:
        case: The case.
        plan: What is installed.
        mesh: All ranks; None on one.
    """

    def __init__(self, case: Case, plan: Plan, mesh: DeviceMesh | None) -> None:
        torch.manual_seed(0)
        self.batch = counts(case.size)
        own = Model(case.size)
        if case.method.package:
            use_package(own.decoder)
        installed = install(own, plan, mesh)
        self.sync, self.mesh, self.own, self.module = None, mesh, own, own
        if mesh is not None and case.method.wrapper:
            self.batch = share(self.batch, dist.get_rank(), dist.get_world_size())
            self.module = wrapped(own, case.method.wrapper)
        elif mesh is not None:
            self.sync = GradientSync(own.parameters(), mesh, partial=installed.partial)
        self.batch["u"].requires_grad_()
        self.optimizer = torch.optim.RMSprop(own.decoder.parameters(), lr=LEARNING_RATE)

    def step_before(self) -> None:
        """Leave what a step leaves: gradients and the optimiser's state; no value changes."""
        for parameter in self.own.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()

    def step(self) -> tuple[float, float]:
        """Seconds and loss."""
        if self.mesh is not None:
            dist.barrier()
        begin = time.perf_counter()
        loss = self.module(**self.batch)
        self.module.zero_grad()
        self.batch["u"].grad = None
        if self.sync is not None:
            self.sync.watch()
        loss.backward()
        if self.sync is not None:
            self.sync.reduce()
        seconds = time.perf_counter() - begin
        self.optimizer.step()
        return seconds, float(loss.detach())

    def gradient(self) -> tuple[float, float]:
        """The anchors' latents': its norm, and what it is along a random direction, the same in every process."""
        grad: Any = self.own.v.grad
        whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        direction = torch.randn(whole.shape, generator=torch.Generator().manual_seed(1))
        return float(whole.norm()), float((whole * direction).sum())

    def sent(self) -> int:
        """Bytes that this rank hands to collectives in a step."""
        counter = _Sent()
        with counter:
            self.step()
        return counter.kinds.total()


class _Sent(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.kinds: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        found = sent_bytes(func, args)
        if found is not None:
            self.kinds[found[0]] += found[1]
        return func(*args, **(kwargs or {}))


def wrapped(model: nn.Module, name: str) -> nn.Module:
    """The model in a wrapper of the name."""
    # torch's FSDP takes as long to load as all else, and most processes do without
    from benchmarks.side_by_side.wrappers import WRAPPERS

    return WRAPPERS[name](model)


def counts(size: Size) -> dict[str, Tensor]:
    """A batch as the model's keyword arguments."""
    n_features = sum(size.decoder().features)
    x = torch.zeros(size.cells, n_features)
    places = torch.randint(x.numel(), (int(NONZERO * x.numel()),))
    # by place: of two values for one place threads would decide
    x.view(-1)[places] = 1.0 + places % 4
    return {
        "u": LATENT_SCALE * torch.randn(size.cells, size.dim),
        "batch": torch.zeros(size.cells, dtype=torch.int64),
        "library": x.sum(1, keepdim=True) + 1,
        "x": x,
    }


def share(batch: dict[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    """A rank's cells."""
    return {name: rows[rank::ranks].clone() for name, rows in batch.items()}
