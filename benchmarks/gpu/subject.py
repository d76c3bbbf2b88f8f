"""A decoder, a batch and an optimiser on a device, with techniques installed: what most parts run steps of."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu.cells import batch_bytes, decoder_batch, moved
from benchmarks.gpu.device import Precision
from benchmarks.side_by_side.cases import Size
from lightning_amp.costs.model_shape import DecoderShape
from lightning_amp.installing.describe_module import describe
from lightning_amp.installing.install import install
from lightning_amp.planning.plan.axes import Axes
from lightning_amp.planning.plan.decoder_only import profile_of_module
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.policies.make_plan import plan
from lightning_amp.simulation.models_without_values import DecoderAlone, decoder_subject
from lightning_amp.techniques.device_settings import rates_of

EAGER = ("S1",)
OURS = ("S1", "S4", "fused", "sparse", "stream")
Settings = Mapping[str, object]
"""Fields of specs, for every rule whose spec has them."""


def plan_of(
    shape: DecoderShape,
    strategies: tuple[str, ...] | None,
    *,
    cells: int,
    device: torch.device,
    sparse: bool = True,
    budget: int | None = None,
    settings: Settings | None = None,
) -> Plan:
    """What the library plans for a decoder by itself on one device.

    Args:
        strategies: Those named; None for the choice of policy "auto" within `budget` bytes.
        sparse: As for Subject; the prediction counts the batch.
        settings: Other forms of the techniques.
    """
    meta = decoder_subject(shape, batch_size=cells).module
    described = describe(
        meta, batch_size=cells, base_activation_bytes=batch_bytes(shape, cells, sparse=sparse)
    )
    made = plan(
        profile_of_module(described),
        strategies=strategies,
        device_memory=budget,
        batch_size=cells,
        shape=described,
        rates=rates_of(device)[0],
    )
    return _with(made, settings or {})


def _with(made: Plan, settings: Settings) -> Plan:
    def changed(spec: Any) -> Any:
        own = {name: value for name, value in settings.items() if hasattr(spec, name)}
        return replace(spec, **own) if own else spec

    rules = tuple(replace(rule, spec=changed(rule.spec)) for rule in made.rules)
    return replace(made, rules=rules, axes=Axes.of(made.strategies, (rule.spec for rule in rules)))


class Subject:
    """A decoder that trains.

    Args:
        size: The decoder and its cells.
        plan: What is installed, made by `plan_of`.
        precision: Of its numbers and products.
        sparse: Whether counts come by their entries, as the data module gives them where there are many features.

    Attributes:
        batch: What it reads.
    """

    def __init__(
        self, size: Size, plan: Plan, *, device: torch.device, precision: Precision, sparse: bool
    ) -> None:
        shape = size.decoder()
        self._device, self._precision = device, precision
        self.batch = moved(decoder_batch(shape, size.cells, sparse=sparse, dtype=precision.dtype), device)
        torch.manual_seed(0)
        with device:
            self._module: Any = DecoderAlone(shape)
        install(self._module, plan)
        optimizers = self._module.configure_optimizers()
        self._module.optimizers = lambda: optimizers
        self._module.manual_backward = torch.Tensor.backward
        self._optimizers = optimizers

    def step(self) -> None:
        """One training step: forward and backward pass, and the optimiser's."""
        for name in ("u", "v"):
            self.batch[name].grad = None
        with self._precision.computing(self._device):
            self._module.training_step(self.batch, 0)

    @property
    def held(self) -> list[Any]:
        """What there is before a step."""
        parameters = list(self._module.parameters())
        states = [dict(optimizer.state) for optimizer in self._optimizers]
        gradients = [p.grad for p in parameters if p.grad is not None]
        return [parameters, list(self._module.buffers()), gradients, states, self.batch]
