"""What the device is, what it reaches by itself, and its rates in the form that AMPStrategy(rates=...) reads."""

import os
import platform
import sys
from dataclasses import asdict

import lightning
import torch

from benchmarks.gpu.device import BF16, FLOAT32, TF32, free_bytes, matmul_rate, median_seconds
from benchmarks.gpu.runner import SkipPart, Work
from lightning_amp.costs.device_rates import Rates
from lightning_amp.errors import PlanError
from lightning_amp.lightning.strategy.hardware import take_workspaces
from lightning_amp.simulation.calibrate import calibrate
from lightning_amp.techniques.rates_of import rates_of

OPERATORS = 1000
FILE = "rates.json"
CALIBRATED_TINY = (300, 16, 3, 16)
"""Anchors, channels, strata and cells."""


def reached(work: Work) -> None:
    """Facts about the machine, then a row for each rate."""
    device, record = work.device, work.record
    record.fact(
        device=device_name(device),
        torch=torch.__version__,
        lightning=lightning.__version__,
        python=sys.version.split()[0],
        processors=os.cpu_count(),
        threads=torch.get_num_threads(),
        capability=torch.backends.cpu.get_cpu_capability(),
    )
    if device.type == "cuda":
        _cuda_facts(work)
    n = 256 if work.tiny else 8192 if device.type == "cuda" else 2048
    rates, note = rates_of(device)
    for precision in (FLOAT32, TF32, BF16):
        rate = matmul_rate(precision, device, n=n)
        record.row(rate=f"products, {precision.name}", n=n, per_second_flops=rate)
    _memory_rate(work)
    x = torch.zeros(1, device=device)
    seconds = median_seconds(lambda: [x.add_(1) for _ in range(OPERATORS)], device, most=5, within=1.0)
    record.row(rate="an operator, launched and done", operator_seconds=seconds / OPERATORS)
    record.note(
        f"Predicted with the rates of {rates.device}: {rates.matmul_flops / 1e12:.3g} TFLOP/s in products,"
        f" {rates.memory_bytes / 1e9:.4g} GB/s, {1e6 * rates.overhead_seconds:.3g} us an operator. {note}".strip()
    )


def device_name(device: torch.device) -> str:
    """As a person knows it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"


def _cuda_facts(work: Work) -> None:
    """Memory that is gone before any tensor: the context, with the libraries' kernels, and what others use."""
    device, found = work.device, torch.cuda.get_device_properties(work.device)
    total, before = int(found.total_memory), free_bytes(device) or 0
    take_workspaces(device)
    reserved = torch.cuda.memory_reserved(device)
    work.record.fact(
        cuda=torch.version.cuda,
        compute_capability=f"{found.major}.{found.minor}",
        total_bytes=total,
        free_at_start_bytes=before,
        workspaces_bytes=torch.cuda.memory_allocated(device),
        context_and_others_bytes=total - torch.cuda.mem_get_info(device)[0] - reserved,
    )


def _memory_rate(work: Work) -> None:
    """Bytes that an elementwise operator reads and writes; its result has its memory already."""
    n = 2**16 if work.tiny else 2**28 if work.device.type == "cuda" else 2**24
    x, out = torch.ones(n, device=work.device), torch.empty(n, device=work.device)
    seconds = median_seconds(lambda: torch.add(x, 1.0, out=out), work.device, most=10, within=1.0)
    work.record.row(rate="memory, x + 1", n=n, per_second_bytes=2 * x.nbytes / seconds)


def calibrated(work: Work) -> None:
    """`lightning-amp calibrate` of this device: write rates.json, and what it was fitted to."""
    try:
        found = calibrate(work.device.type, index=work.device.index or 0, sizes=CALIBRATED_TINY if work.tiny else None)
    except PlanError as error:
        if "keeps it busy" in str(error):
            raise SkipPart(str(error)) from error
        raise
    path = work.out / FILE
    path.write_text(found.after.to_json())
    assert Rates.read(path) == found.after, "what was written is what will be read"
    for name, timing in (("fitted", found.fitted), ("check", found.check)):
        work.record.row(
            step=name,
            strategies=",".join(timing.strategies),
            predicted_seconds=timing.before,
            measured_seconds=timing.measured,
            predicted_now_seconds=timing.after,
        )
    work.record.fact(
        rates_of=found.after.device,
        matmul_flops=found.after.matmul_flops,
        memory_rate_bytes=found.after.memory_bytes,
        operator_seconds=found.after.overhead_seconds,
        **{f"host_{name}_rate_bytes": rate for name, rate in asdict(found.after.host).items()},
    )
