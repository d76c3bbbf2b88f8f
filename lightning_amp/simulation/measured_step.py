"""Install a plan in a simulated module, and measure the second training step of a rank, phase by phase.

The second step is measured, because the optimiser's state and the last step's gradients exist then. The first one is
not run: every parameter gets a gradient with its own memory, and the optimiser steps once. If the backward pass leaves
other gradients (none for parameters that it does not reach, or views of larger tensors), the step after it is measured
instead.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp, all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_amp.footprint.module_profile import ACTIVATIONS, GRADIENTS, PARAMETERS, STATE, TEMPORARIES
from lightning_amp.installing.install import install
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.simulation.byte_meter import OutOfBudget, SimulatedMeter
from lightning_amp.simulation.models_without_values import Subject
from lightning_amp.techniques.contract.protocol import DecomposedDecoder, find_decoders
from lightning_amp.techniques.data.batch_norm import share_batch_statistics
from lightning_amp.techniques.data.gradient_sync import GradientSync
from lightning_amp.techniques.data.row import ShareBatchStatistics
from lightning_amp.techniques.ranks.shards import sizes_of_rank

Sizes = tuple[object, ...]


class PlannedRank:
    """A module and batch with an installed plan, as on one rank of the mesh; `subject` is changed in place."""

    def __init__(self, subject: Subject, plan: Plan, mesh: DeviceMesh) -> None:
        self.module = cast(Any, subject.module)
        self.batch = subject.batch
        # there is no Trainer
        self.module.log = self.module.log_dict = lambda *args, **kwargs: None
        installed = install(subject.module, plan, mesh)
        if any(isinstance(rule.spec, ShareBatchStatistics) for rule in plan.rules):
            share_batch_statistics(subject.module, mesh["data"])
        self.parameters = list(subject.module.parameters())
        self.gradients = _SureSync(
            self.parameters, mesh, partial=installed.partial, sharded=[part.shard for part in installed.sharded]
        )
        self.optimizers: list[Optimizer] = self.module.configure_optimizers()

    @property
    def sizes(self) -> Sizes:
        """Sizes that determine the memory of a rank: equal sizes need equal memory."""
        return sizes_of_rank(self.module)

    def decoder(self) -> DecomposedDecoder | None:
        """Largest decomposed decoder."""
        found = find_decoders(self.module).values()
        return max(found, key=lambda d: d.n_anchors * len(d.strata), default=None)


class _SureSync(GradientSync):
    """Reduction of gradients if ranks together reach all partial parameters, and each reaches the same others."""

    def _agree(self, grads: Mapping[int, Tensor]) -> list[int]:
        everyone = torch.empty(len(self._parameters), dtype=torch.uint8, device="meta")
        all_reduce(everyone, ReduceOp.MAX, group=self._everyone)
        return sorted(self._reached | self._partial)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankResult:
    """Memory and communication of one rank's step.

    Attributes:
        peak_bytes: Peak; if the budget was exceeded, including the request that exceeded it.
        bytes_of_strata: Bytes alive after each of the rank's strata, up to where the forward pass stopped.
        comm_bytes: Bytes given to collectives, by kind.
        failed_at: Phase in which the budget was exceeded, None if it was not.
    """

    rank: int
    peak_bytes: int
    breakdown: dict[str, int]
    bytes_of_strata: dict[int, int]
    comm_bytes: dict[str, int]
    failed_at: str | None = None
    requested_bytes: int | None = None

    @property
    def strata_bytes(self) -> tuple[int, ...]:
        """Values of `bytes_of_strata`, in the order of the strata."""
        return tuple(self.bytes_of_strata.values())


class MeasuredStep:
    """Run the second training step of a rank; `on_stratum` is called after every stratum, forward and backward."""

    def __init__(self, planned: PlannedRank, *, budget_bytes: int | None, on_stratum: Callable[[], object]) -> None:
        self.planned = planned
        self.strata_bytes: dict[int, int] = {}
        self.meter = SimulatedMeter()
        self._budget_bytes, self._on_stratum = budget_bytes, on_stratum

    def run(self, rank: int) -> RankResult:
        """Run and measure the step."""
        # state after the first step, which is not run: gradients and the optimiser's state
        trained = [parameter for parameter in self.planned.parameters if parameter.requires_grad]
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
        for optimizer in self.planned.optimizers:
            optimizer.step()
        self._hook()
        requested_bytes = self._measure()
        # the next step starts with the gradients of this one: if they differ from those at its start, its peak is not
        # that of a later step
        if requested_bytes is None and not all(map(_has_gradient_of_its_own, trained)):
            # the optimiser has no state for parameters that no step reaches
            for parameter in (parameter for parameter in trained if parameter.grad is None):
                for optimizer in self.planned.optimizers:
                    optimizer.state.pop(parameter, None)
            requested_bytes = self._measure()
        return RankResult(
            rank=rank,
            peak_bytes=self.meter.peak,
            breakdown=self.meter.breakdown,
            bytes_of_strata=dict(sorted(self.strata_bytes.items())),
            comm_bytes=dict(self.meter.sent),
            failed_at=None if requested_bytes is None else self.meter.phase,
            requested_bytes=requested_bytes,
        )

    def _measure(self) -> int | None:
        """Run the step; return the request that exceeded the budget, None if none did."""
        # cached shapes stay valid
        self.meter = SimulatedMeter(budget_bytes=self._budget_bytes, answers=self.meter.answers)
        self.strata_bytes.clear()
        self._place = "the encoders and the graph"
        planned, meter = self.planned, self.meter
        try:
            meter.enter("the weights, optimiser state and batch", making=TEMPORARIES)
            meter.hold([planned.parameters, list(planned.module.buffers())], PARAMETERS)
            meter.hold([p.grad for p in planned.parameters], GRADIENTS)
            meter.hold([dict(optimizer.state) for optimizer in planned.optimizers], STATE)
            meter.hold(planned.batch, ACTIVATIONS)
            with self.meter:
                self.meter.enter(self._place, making=ACTIVATIONS)
                self.planned.module.training_step(self.planned.batch, 1)
        except OutOfBudget as failure:
            return failure.requested_bytes
        return None

    def _hook(self) -> None:
        planned, module = self.planned, self.planned.module
        module.optimizers = lambda: planned.optimizers
        module.manual_backward = self._backward
        planned.gradients.watch()

        def accumulated(parameter: Tensor) -> None:
            self.meter.hold(parameter.grad, GRADIENTS)

        for parameter in planned.parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]
        for optimizer in planned.optimizers:
            optimizer.register_step_pre_hook(partial(self._enter, "the optimiser step", TEMPORARIES))
            optimizer.register_step_post_hook(lambda *_: self._go_on())
        decoder = planned.decoder()
        if isinstance(decoder, nn.Module):
            decoder.register_forward_pre_hook(self._before_decoder)
            for k, stratum in enumerate(decoder.strata):
                stratum.register_forward_pre_hook(partial(self._enter, f"stratum {k}", ACTIVATIONS))
                stratum.register_forward_hook(partial(self._after_stratum, k))

    def _backward(self, loss: Tensor) -> None:
        self._enter(f"the backward pass of {self._place}", TEMPORARIES)
        loss.backward()  # type: ignore[no-untyped-call]
        self._enter("the reduction of gradients", TEMPORARIES)
        self.planned.gradients.reduce()
        self._go_on()

    def _enter(self, phase: str, making: str, *_: Any) -> None:
        self.meter.enter(phase, making=making)

    def _go_on(self) -> None:
        self._enter(self._place, ACTIVATIONS)

    def _before_decoder(self, module: nn.Module, latents: tuple[Tensor, ...]) -> None:
        def after_strata(_: Tensor) -> None:
            self._enter("the backward pass of the encoders and the graph", TEMPORARIES)

        # the gradient of a latent is complete after the backward pass of all strata
        for latent in latents:
            if latent.requires_grad:
                latent.register_hook(after_strata)  # type: ignore[no-untyped-call]

    def _after_stratum(self, k: int, module: nn.Module, args: Any, output: tuple[Tensor, Tensor]) -> None:
        self.strata_bytes[k] = self.meter.current
        self._on_stratum()
        self._place = "the other decoders"
        self._go_on()

        def begin_backward(_: Tensor) -> None:
            self._enter(f"the backward pass of stratum {k}", TEMPORARIES)
            self._on_stratum()

        output[0].register_hook(begin_backward)  # type: ignore[no-untyped-call]


def _has_gradient_of_its_own(parameter: Tensor) -> bool:
    grad = parameter.grad
    return grad is not None and grad.untyped_storage().nbytes() == parameter.nbytes
