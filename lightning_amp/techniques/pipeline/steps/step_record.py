"""Record the side effects of a step on the rank of the last pipeline stage, and replay them on the other ranks.

Side effects are calls of `self.log`, updates of metrics, attributes that the step sets, and its return value. Ranks of
earlier stages leave the step before any of these. The last stage records them, and all ranks then log the same values
in the same order. If a micro-batch logs or updates something that the run of the full batch does not (inside a block,
for example), it would be lost, and an error is raised.

Known limits: all states of a metric are sent after every step that updates it. A metric with list states that a step
updates and resets has its old state, and raises the same error. Direct calls of a logger run on the last stage only.
"""

import io
import pickle
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_amp._torch import has_no_values, tree_map
from lightning_amp.errors import InstallError, ModelError
from lightning_amp.footprint.run_again.recompute_state import DEPTH, mark_of
from lightning_amp.techniques.pipeline.steps.step_attributes import AttributeChange, Attributes, apply
from lightning_amp.techniques.put_methods import methods_put

MUTED = ("update", "forward", "compute", "reset")


@dataclass
class StepRecord:
    """Side effects of one step; if `error` is set, all ranks raise it."""

    logged: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    attributes: list[AttributeChange] = field(default_factory=list)
    returned: Any = None
    error: Exception | None = None

    @property
    def names(self) -> set[str]:
        """Names of what the step has logged and updated, for messages."""
        return {_logged(name, args, kwargs) for name, args, kwargs in self.logged} | {
            _updated(name) for name in self.metrics
        }


class StageStepRecorder:
    """Record and replay the side effects of one module's steps.

    Args:
        module: The LightningModule.
        blocks: Its blocks, whose attributes stay on their rank.
    """

    def __init__(self, module: LightningModule, blocks: list[nn.Module]) -> None:
        self._module = module
        outside = [*blocks, *(metric for _, metric in self._metrics())]
        inside = {id(part) for whole in outside for part in whole.modules()}
        self._outside_blocks = {name: part for name, part in module.named_modules() if id(part) not in inside}
        self._noted: set[str] = set()

    @contextmanager
    def recording(self, record: StepRecord) -> Iterator[None]:
        """Context manager: record logged values and changes of metrics and attributes; nothing is logged.

        If the step fails, its attributes are restored.
        """
        # not only the number of updates, which is the same after a reset and one update; the states are kept alive,
        # because a new tensor may have the mark of one that was freed
        before = {name: (state := _state(metric), _mark(state)) for name, metric in self._metrics()}
        attributes = self._attributes()

        def recorder(name: str) -> Any:
            def log(*args: Any, **kwargs: Any) -> None:
                self._noted.add(_logged(name, args, kwargs))
                record.logged.append((name, *self._sendable((args, kwargs))))

            return log

        updated = []
        try:
            with self._logging(recorder):
                yield
        except BaseException:
            attributes.put_back()
            raise
        finally:
            updated = [(n, metric) for n, metric in self._metrics() if _mark(_state(metric)) != before[n][1]]
            self._noted |= {_updated(name) for name, _ in updated}
        record.metrics |= {name: self._sendable(_state(metric)) for name, metric in updated}
        record.attributes += attributes.changes()

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Context manager for a micro-batch or another partial run: log nothing, and keep metrics and attributes."""
        # on the instance, as a metric's wrappers are: the class is shared with metrics of other modules
        silent = [(metric, dict.fromkeys(MUTED, self._noting(_updated(name)))) for name, metric in self._metrics()]
        attributes = self._attributes()
        try:
            with (
                methods_put(silent),
                self._logging(lambda name: lambda *args, **kw: self._noted.add(_logged(name, args, kw))),
            ):
                yield
        finally:
            attributes.put_back()

    def play(self, record: StepRecord, *, recorded_here: bool) -> None:
        """Log what was recorded, and set metrics and attributes to the values on the recording rank.

        Raises:
            ModelError: A micro-batch has logged or updated something that the run of the full batch has not.
        """
        # noted in micro-batches but not in the full run: the values for the full batch do not exist
        lost, self._noted = self._noted - record.names, set()
        if lost:
            raise ModelError(
                f"pipeline: {sorted(lost)!r} happened inside or between blocks, where one stage sees one micro-batch,"
                " or the step updated and reset a metric whose states are lists: log and update metrics after the"
                " blocks, reset those at the end of the epoch, or leave 'pipeline' out"
            )
        named = dict(self._module.named_modules())
        if not recorded_here:
            for name, state in record.metrics.items():
                _set_state(named[name], state, self._module.device)
            apply(record.attributes, named)
        for name, args, kwargs in record.logged:
            log: Any = named[name].log
            log(*args, **kwargs)

    def packed(self, record: StepRecord) -> bytes:
        """Serialize a record for other ranks.

        Raises:
            ModelError: A tensor in it has no values on this rank, or an object cannot be pickled.
        """
        try:
            return self._pack(record)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            names = [change.full_name for change in record.attributes if not self._can_be_sent(change)]
            raise ModelError(
                f"pipeline: the step set the attributes {names!r}, or logged or returned a value, that cannot be"
                f" sent to other ranks ({error}); keep numbers and tensors, or leave 'pipeline' out"
            ) from error

    def unpacked(self, packed: bytes) -> StepRecord:
        """Deserialize a record, with references to this rank's modules."""
        found: StepRecord = _RecordUnpickler(io.BytesIO(packed), dict(self._module.named_modules())).load()
        return found

    def _pack(self, found: Any) -> bytes:
        file = io.BytesIO()
        names = {id(part): name for name, part in self._module.named_modules()}
        _Pickler(file, names).dump(found)
        return file.getvalue()

    def _can_be_sent(self, change: AttributeChange) -> bool:
        try:
            self._pack(change)
        except (pickle.PicklingError, TypeError, AttributeError):
            return False
        return True

    def _attributes(self) -> Attributes:
        return Attributes(self._outside_blocks, dict(self._module.named_modules()))

    def _metrics(self) -> list[tuple[str, Metric]]:
        return [(name, part) for name, part in self._module.named_modules() if isinstance(part, Metric)]

    def _noting(self, what: str) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Tensor:
            self._noted.add(what)
            return torch.zeros(())

        return noted

    def _sendable(self, values: Any) -> Any:
        """Copy tensors to the host, with their current values."""

        def send(value: Any) -> Any:
            return value.detach().cpu().clone() if isinstance(value, Tensor) else value

        return tree_map(send, values, is_leaf=lambda value: isinstance(value, nn.Module))

    def _logging(self, make: Any) -> AbstractContextManager[None]:
        named = self._module.named_modules()
        return methods_put(
            (part, {"log": make(name), "all_gather": _refuse_all_gather})
            for name, part in named
            if isinstance(part, LightningModule)
        )


class _Pickler(pickle.Pickler):
    """Pickle modules as their names, and tensors as copies on the host."""

    def __init__(self, file: io.BytesIO, names: Mapping[int, str]) -> None:
        super().__init__(file)
        self._names = names

    def persistent_id(self, obj: Any) -> str | None:
        return self._names.get(id(obj)) if isinstance(obj, nn.Module) else None

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return NotImplemented
        if has_no_values(obj):
            raise ModelError(
                f"pipeline: the step logs, returns or keeps a tensor of shape {tuple(obj.shape)!r} that an earlier"
                " stage computed and no block returns: let blocks return it, or leave 'pipeline' out"
            )
        # cloned, because a view would be pickled with its full storage
        return obj.detach().cpu().clone().__reduce_ex__(2)  # type: ignore[no-untyped-call]


class _RecordUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, modules: Mapping[str, nn.Module]) -> None:
        super().__init__(file)
        self._modules = modules

    def persistent_load(self, pid: Any) -> nn.Module:
        return self._modules[pid]


def _logged(module: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    name = args[0] if args else kwargs.get("name")
    return f"{module + '.' if module else ''}log({name!r})"


def _updated(metric: str) -> str:
    return f"the metric {metric!r}"


def _refuse_all_gather(*args: Any, **kwargs: Any) -> None:
    raise InstallError(
        "pipeline: the step calls self.all_gather, which requires that all ranks reach the same call: gather in"
        " on_train_batch_end or at the end of an epoch, or leave 'pipeline' out"
    )


def _state(metric: Metric) -> dict[str, Any]:
    names = (*metric._defaults, "_update_count", "_forward_cache")
    return {name: getattr(metric, name) for name in names}


def _mark(state: dict[str, Any]) -> Any:
    return mark_of(state, {}, DEPTH)


def _set_state(metric: Any, state: dict[str, Any], device: torch.device) -> None:
    for name, value in state.items():
        setattr(metric, name, tree_map(lambda v: v.to(device) if isinstance(v, Tensor) else v, value))
    metric._computed = None
