"""`lightning-amp calibrate` of this device: its rates, in the form that AMPStrategy(rates=...) reads."""

from benchmarks.gpu.record import SkipPart
from benchmarks.gpu.run_parts import Work
from lightning_amp.costs.device_rates import Rates
from lightning_amp.errors import PlanError
from lightning_amp.simulation.calibrate import calibrate

FILE = "rates.json"
TINY = (300, 16, 3, 16)
"""Anchors, channels, strata and cells."""


def run(work: Work) -> None:
    """Write rates.json, and what it was fitted to."""
    try:
        found = calibrate(work.device.type, index=work.device.index or 0, sizes=TINY if work.tiny else None)
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
    )
