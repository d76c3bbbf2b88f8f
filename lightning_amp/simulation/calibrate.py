"""Calibrate the cost model: measure one decoder step on this device, and fit its rates to the measurement.

A decoder of synthetic sizes runs forward and backward in two forms, which alternate in every round: with the techniques
that policy "auto" chooses for one device, and without techniques. The best round of each counts, because other
processes only slow a step down. If the median round took much longer, or the best one had to wait for a processor,
nothing is fitted. The rates are fitted to the first form; the second is the check: if the model had all proportions
right, its new prediction would equal the measurement. The link to host memory is measured by copies.

On a GPU the bytes of CUDA's context are measured too: what is taken of the device outside of torch's allocator.

Known limits: one device, so the links stay those of the nearest device in the table; one size, float32, no optimiser.
What other processes take of a GPU counts as its context.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from textwrap import fill
from typing import Any

import torch
from torch import nn

from lightning_amp.costs.device_memory import DeviceMemory
from lightning_amp.costs.device_rates import Rates
from lightning_amp.costs.host_link import HostLink
from lightning_amp.costs.model_shape import WINDOW_PER_STRATUM, DecoderShape, profile_of_module
from lightning_amp.errors import PlanError
from lightning_amp.installing.describe_module import describe
from lightning_amp.installing.install import install
from lightning_amp.lightning.strategy.hardware import measured_memory
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.policies.make_plan import plan
from lightning_amp.planning.reports.plan_report import techniques
from lightning_amp.progress import track
from lightning_amp.quantities import format_bytes, format_seconds
from lightning_amp.simulation.calibrate_host import host_link_report, measure_host_link, measure_nodes, nodes_report
from lightning_amp.simulation.models_without_values import DecoderAlone
from lightning_amp.techniques.rates_of import rates_of
from lightning_amp.text_table import WIDTH, table

SCHEMA = 1
WARM_UP, ROUNDS = 2, 7
NON_ZERO = 0.05
SPREAD = 2.0
"""Largest ratio of the median round to the best one."""
SHARE = 0.7
"""Least share of a processor that an undisturbed step gets."""
SIZES = {"cpu": (2000, 64, 6, 32), "cuda": (20_000, 128, 16, 64)}
"""Anchors, channels, strata and cells; on both devices a step takes about half a second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds of one decoder step: predicted with the rates before and after, and measured in the best round."""

    strategies: tuple[str, ...]
    before: float
    measured: float
    slowest: float
    after: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Rates before and after, the step that they were fitted to, and another step as a check.

    `note` names the device whose rates `before` are, if this device is not in the table; else "".
    `nodes`: the link to host memory of each NUMA node, of a GPU with several.
    """

    decoder: DecoderShape
    cells: int
    before: Rates
    after: Rates
    fitted: Timing
    check: Timing
    note: str
    nodes: Mapping[int, HostLink] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON."""
        return {"schema": SCHEMA, **asdict(self)}


def calibrate(
    device: str | None = None, *, index: int = 0, sizes: tuple[int, int, int, int] | None = None
) -> Calibration:
    """Measure a step on one device of this machine, and fit the rates.

    Args:
        device: "cpu" or "cuda"; None for CUDA if it is available.
        index: Index of the GPU.
        sizes: Anchors, channels, strata and cells; None for those of `SIZES`.

    Raises:
        PlanError: The machine does not have the device, or is busy.
    """
    place, threads = device_of(device, index), torch.get_num_threads()
    name = f"cpu, {threads} {'thread' if threads == 1 else 'threads'}"
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else name
    anchors, dim, strata, cells = sizes or SIZES[place.type]
    decoder = DecoderShape(
        fqn="decoder",
        anchors=anchors,
        dim=dim,
        features=tuple(anchors - k for k in range(strata)),
        distances=tuple(range(strata)),
        attention=True,
        window=WINDOW_PER_STRATUM * strata,
    )
    before, note = rates_of(place)
    plans = [_plan(decoder, cells, before, strategies) for strategies in (None, "S1")]
    rounds = _measure([_step(decoder, made, cells, place) for made in plans], place)
    measured = [min(found) for found in rounds]
    predicted = [made.predicted_step_seconds or 0.0 for made in plans]
    after = replace(calibrated(before, predicted[0], measured[0]), device=f"{name}, calibrated")
    if place.type == "cuda":
        # before any buffer of a copy
        after = replace(after, memory=measured_memory(place))
    after = replace(after, host_link=measure_host_link(place))
    again = [_plan(decoder, cells, after, made.strategies or "S1").predicted_step_seconds for made in plans]
    timings = [
        Timing(strategies=made.strategies, before=b, measured=min(found), slowest=max(found), after=a or 0.0)
        for made, b, found, a in zip(plans, predicted, rounds, again, strict=True)
    ]
    return Calibration(
        decoder=decoder,
        cells=cells,
        before=before,
        after=after,
        fitted=timings[0],
        check=timings[1],
        note=note,
        nodes=measure_nodes(place) if place.type == "cuda" else {},
    )


def calibration_report(found: Calibration) -> str:
    """Format both steps, and the rates before and after."""
    rows = [
        [
            name,
            format_seconds(timing.before),
            format_seconds(timing.measured),
            format_seconds(timing.after),
            techniques(timing.strategies),
        ]
        for name, timing in (("fitted", found.fitted), ("check", found.check))
    ]
    spread = ", ".join(
        f"{timing.slowest / timing.measured:.2f} times ({name})"
        for name, timing in (("fitted", found.fitted), ("check", found.check))
    )
    before, after, d = found.before, found.after, found.decoder
    numbers = [
        ["products", *(f"{r.matmul_flops / 1e9:.4g} GFLOP/s" for r in (before, after))],
        ["memory", *(f"{r.memory_bytes / 1e9:.4g} GB/s" for r in (before, after))],
        ["an operator", *(format_seconds(r.overhead_seconds) for r in (before, after))],
    ]
    sections = [
        f"Calibrated {after.device.removesuffix(', calibrated')}: a decoder step with {d.anchors:,} anchors,"
        f"\n{len(d.features)} strata, {d.dim} channels, {found.cells} cells",
        table(["step", "predicted", "measured", "predicted now", "techniques"], rows),
        fill(f"Measured is the best of {ROUNDS} rounds; the slowest took {spread} as long.", WIDTH),
        table(["rate", "before", "now"], numbers),
        *([] if after.host_link is None else [host_link_report(after.host_link, before)]),
        *([nodes_report(found.nodes)] if found.nodes else []),
        *([_of_context(after.memory)] if after.memory is not None else []),
        *([found.note] if found.note else []),
    ]
    return "\n\n".join(sections)


def calibrated(rates: Rates, predicted_seconds: float, measured_seconds: float) -> Rates:
    """Scale rates so that the prediction for one device equals the measurement.

    One factor scales all rates of the device; links and the device's name do not change. The prediction must use these
    rates and the measured step, which has no communication.
    """
    faster = predicted_seconds / measured_seconds
    return replace(
        rates,
        matmul_flops=rates.matmul_flops * faster,
        memory_bytes=rates.memory_bytes * faster,
        overhead_seconds=rates.overhead_seconds / faster,
    )


def _of_context(memory: DeviceMemory) -> str:
    context, total = format_bytes(memory.context_bytes), format_bytes(memory.total_bytes)
    return f"CUDA's context and other processes take {context} of {total}; cuBLAS's workspaces are apart"


def device_of(device: str | None, index: int) -> torch.device:
    """Return the device of a name and index; None takes CUDA where it is available.

    Raises:
        PlanError: The machine does not have it.
    """
    there = torch.cuda.device_count()
    # an index implies a GPU, so a machine without one raises an error instead of using its CPU
    kind = device or ("cuda" if there or index else "cpu")
    if kind not in SIZES:
        raise PlanError(f"device={device!r} is not supported; allowed are 'cpu' and 'cuda'")
    if kind == "cpu" and index:
        raise PlanError(f"index {index!r} was given with device 'cpu', which is a GPU's; leave one of them out")
    if kind == "cuda" and not 0 <= index < there:
        raise PlanError(
            f"GPU {index!r} is not supported: torch finds {there} of them here; allowed are indices below"
            " that, and device 'cpu'"
        )
    return torch.device("cpu") if kind == "cpu" else torch.device("cuda", index)


def _plan(decoder: DecoderShape, cells: int, rates: Rates, strategies: str | tuple[str, ...] | None) -> Plan:
    with torch.device("meta"):
        module = DecoderAlone(decoder)
    shape = describe(module, batch_size=cells)
    return plan(profile_of_module(shape), strategies=strategies, batch_size=cells, shape=shape, rates=rates)


def _step(decoder: DecoderShape, made: Plan, cells: int, place: torch.device) -> Callable[[], None]:
    """Return a function that runs forward and backward with newly allocated gradients."""
    with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []), place:
        torch.manual_seed(0)
        module: nn.Module = DecoderAlone(decoder)
        x = (torch.rand(cells, sum(decoder.features)) < NON_ZERO).float()
        batch = {
            "u": torch.randn(cells, decoder.dim, requires_grad=True),
            "v": torch.randn(decoder.anchors, decoder.dim, requires_grad=True),
            "x": x,
            "library": x.sum(1, keepdim=True) + 1,
            "batch": torch.zeros(cells, dtype=torch.int64),
        }
    install(module, made)
    leaves = [*module.parameters(), batch["u"], batch["v"]]

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        module.get_submodule(decoder.fqn)(**batch).backward()

    return step


def _measure(steps: list[Callable[[], None]], place: torch.device) -> list[list[float]]:
    """Return the seconds of every round of every step; the steps alternate.

    Raises:
        PlanError: The machine is busy.
    """
    seconds: list[list[float]] = [[] for _ in steps]
    worked: list[list[float]] = [[] for _ in steps]
    for _ in track(range(WARM_UP + ROUNDS), description="measuring", total=WARM_UP + ROUNDS):
        for step, found, at_work in zip(steps, seconds, worked, strict=True):
            _wait(place)
            begin, begin_work = time.perf_counter(), time.process_time()
            step()
            _wait(place)
            found.append(time.perf_counter() - begin)
            at_work.append(time.process_time() - begin_work)
    rounds = [found[WARM_UP:] for found in seconds]
    best = [min(found) for found in rounds]
    spread = max(median(found) / least for found, least in zip(rounds, best, strict=True))
    # processor time of all threads is less than the elapsed time if a step waits for a processor
    share = min(
        at_work[found.index(least)] / least for at_work, found, least in zip(worked, seconds, best, strict=True)
    )
    # the processor waits while a GPU works, so its share says nothing there
    refuse_busy(place, spread, share if place.type == "cpu" else 1.0)
    return rounds


def refuse_busy(place: torch.device, spread: float, share: float = 1.0) -> None:
    """Raise an error if other processes disturb a measurement.

    Args:
        spread: Ratio of the median round to the best one.
        share: Share of a processor that the best round had.

    Raises:
        PlanError: The device is busy.
    """
    if spread > SPREAD or share < SHARE:
        raise PlanError(
            f"cannot calibrate on {place}: something else keeps it busy, and the median round took "
            f"{spread:.1f} times as long as the best one, which had {share:.0%} of a processor. Calibrate "
            "when the machine is idle"
        )


def _wait(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize(place)
