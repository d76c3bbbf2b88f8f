"""Predicted seconds of a decoder's step beside those that were measured on an H100 (docs/reports/gpu.md).

    python -m benchmarks.kernels.measured_steps [--write]

Decoders of K 32, D 128 and w 640 in float32. A prediction is what kernels cost whatever they compute
(`Rates.overhead_seconds`), and products and bytes by the data sheet. `--write` puts the table into docs/reports/gpu.md.
"""

import argparse
from dataclasses import replace
from math import exp, log

from benchmarks.page import ROOT, origin, paragraph, table, write_part
from lightning_amp.costs.device_rates import Rates, rates_for
from lightning_amp.planning.plan.mesh_shape import MeshShape
from lightning_amp.planning.plan.plan import Axes
from lightning_amp.planning.time.step_seconds import decoder_seconds, on_device
from lightning_amp.quantities import format_seconds
from lightning_amp.simulation.parse_shape import parse_shape
from tests.planning.profiles import shape_of_decoder

PAGE, PART = ROOT / "docs" / "reports" / "gpu.md", "kernels.measured_steps"
MEASURED = {
    (5400, 256, ()): 0.133,
    (5400, 256, ("sdpa", "sparse")): 0.103,
    (5400, 256, ("S4", "fused", "sparse", "stream")): 0.139,
    (27_000, 128, ()): 0.234,
    (27_000, 128, ("sdpa", "sparse")): 0.181,
    (27_000, 128, ("S4", "fused", "sparse", "stream")): 0.226,
    (113_505, 1, ()): 0.658,
    (113_505, 1, ("sdpa",)): 0.480,
    (113_505, 1, ("S4", "fused", "sparse", "stream")): 0.654,
}
"""Seconds of a step by anchors, cells and techniques."""


def predicted(anchors: int, cells: int, strategies: tuple[str, ...], rates: Rates) -> float:
    """Seconds of a step of the decoder."""
    decoder = parse_shape(f"anchors={anchors},dim=128,strata=32,batch={cells}").decoder
    shape = on_device(shape_of_decoder(decoder, batch_size=cells), rates)
    return decoder_seconds(shape, Axes.of(strategies), MeshShape(data=1, model=1), rates)


def main() -> None:
    """Print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.relative_to(ROOT)}")
    asked = parser.parse_args()
    rates = rates_for("H100")
    rows, off = [], list[float]()
    for (anchors, cells, strategies), seconds in MEASURED.items():
        found = predicted(anchors, cells, strategies, rates)
        launches = found - predicted(anchors, cells, strategies, replace(rates, overhead_seconds=0.0))
        off.append(abs(log(found / seconds)))
        names = ", ".join(strategies) or "plain"
        times = map(format_seconds, (launches, found, seconds))
        rows.append([f"{anchors:,}", str(cells), names, *times, f"{found / seconds:.2f}"])
    head = ["N", "B", "plan", "of kernels", "predicted", "measured", "ratio"]
    said = f"In the mean a prediction is off by a factor of {exp(sum(off) / len(off)):.2f}."
    command = "python -m benchmarks.kernels.measured_steps --write"
    lines = [*paragraph(f"{origin(command)} {said}"), "", *table(head, rows)]
    if asked.write:
        write_part(PAGE, PART, lines)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
