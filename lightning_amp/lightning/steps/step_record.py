"""What a step does beside its loss, on the one rank that runs it to its end, done again on the others.

`self.log`, the metrics that it updates, and what it returns: the ranks of a pipeline before the last stage leave the
step before any of it. The last stage records, and all ranks then log the same values in the same order.

Known limits: the states of metrics are sent whole after every step that updates them; attributes that a step sets, and
a logger that it calls by itself, are those of the last stage's rank.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_amp._torch import tree_map

MUTED = ("update", "forward", "compute")


@dataclass(frozen=True)
class MetricName:
    """A metric that is logged, by its name in the module."""

    name: str


@dataclass
class StepRecord:
    """Of one step; `error` is what all ranks raise instead of going on."""

    logged: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    returned: Any = None
    error: Exception | None = None


class StepRecorder:
    """Of one module."""

    def __init__(self, module: LightningModule) -> None:
        self._module = module

    @contextmanager
    def recording(self, record: StepRecord) -> Iterator[None]:
        """What is logged, and the metrics that change, go to the record; nothing is logged."""
        before = {name: metric._update_count for name, metric in self._metrics()}

        def recorder(name: str) -> Any:
            def log(*args: Any, **kwargs: Any) -> None:
                record.logged.append((name, *self._sendable((args, kwargs))))

            return log

        with self._logging(recorder):
            yield
        for name, metric in self._metrics():
            if metric._update_count != before[name]:
                record.metrics[name] = self._sendable(_state(metric))

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Nothing is logged, and metrics stay as they are: a part of a step is run, or a part of its batch."""
        kept = [(metric, {name: vars(metric).get(name) for name in MUTED}) for _, metric in self._metrics()]
        for metric, _ in kept:
            vars(metric).update(dict.fromkeys(MUTED, _nothing))
        try:
            with self._logging(lambda name: _nothing):
                yield
        finally:
            for metric, own in kept:
                for name, value in own.items():
                    if value is None:
                        vars(metric).pop(name)
                    else:
                        vars(metric)[name] = value

    def play(self, record: StepRecord, *, metrics: bool) -> None:
        """Log what was recorded; with `metrics`, give metrics the state that they have on the rank of the record."""
        named = dict(self._module.named_modules())
        if metrics:
            for name, state in record.metrics.items():
                _set_state(named[name], state, self._module.device)
        for name, args, kwargs in record.logged:
            args, kwargs = tree_map(
                lambda value: named[value.name] if isinstance(value, MetricName) else value, (args, kwargs)
            )
            log: Any = named[name].log
            log(*args, **kwargs)

    def _metrics(self) -> list[tuple[str, Metric]]:
        return [(name, part) for name, part in self._module.named_modules() if isinstance(part, Metric)]

    def _sendable(self, values: Any) -> Any:
        names = {id(metric): name for name, metric in self._metrics()}

        def send(value: Any) -> Any:
            if isinstance(value, Metric):
                return MetricName(names[id(value)])
            return value.detach().cpu().clone() if isinstance(value, Tensor) else value

        return tree_map(send, values, is_leaf=lambda value: isinstance(value, nn.Module))

    @contextmanager
    def _logging(self, make: Any) -> Iterator[None]:
        modules = {n: part for n, part in self._module.named_modules() if isinstance(part, LightningModule)}
        for name, part in modules.items():
            part.log = make(name)  # type: ignore[method-assign]
        try:
            yield
        finally:
            for part in modules.values():
                vars(part).pop("log", None)


def _nothing(*args: Any, **kwargs: Any) -> Tensor:
    return torch.zeros(())


def _state(metric: Metric) -> dict[str, Any]:
    names = (*metric._defaults, "_update_count", "_forward_cache")
    return {name: getattr(metric, name) for name in names}


def _set_state(metric: Any, state: dict[str, Any], device: torch.device) -> None:
    for name, value in state.items():
        setattr(metric, name, tree_map(lambda v: v.to(device) if isinstance(v, Tensor) else v, value))
    metric._computed = None
