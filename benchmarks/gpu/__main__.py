"""Everything that a device can prove or correct, in one command of less than nine minutes.

    python -m benchmarks.gpu --out DIR [--tiny] [--device cpu] [--only exactness,speed] [--ranks 2 4]

Needs one CUDA device, torch, lightning and what importing lightning_amp needs; runs from a source tree on PYTHONPATH.
Every part runs in a process of its own with its own clock, and a part that fails or runs out of its time does not keep
the next one from running. Parts come by importance. Each has its share of the time and what those before have left; one
that had no time is told. Results are written as they come: report.md, and JSON files of a few parts each; rates.json is
for AMPStrategy(rates=...). The exit status is 0 when all parts ran, 1 when one failed or had no time, 130 when
interrupted.

`--tiny --device cpu` runs all of it with small sizes, in some minutes of a processor.
"""

import argparse
import signal
import sys
from pathlib import Path

from benchmarks.gpu import (
    chunks,
    exactness,
    generic,
    host,
    kernels,
    language_model,
    memory,
    rates,
    reserved,
    ring,
    several_ranks,
    speed,
    trainer,
    zoo,
)
from benchmarks.gpu.report import FILE, write_report
from benchmarks.gpu.runner import Part, Runner

SECONDS = 525.0
"""For all parts; what is left of nine minutes is the start's."""
INTERRUPTED = 130
PARTS = (
    # what was never run on a GPU comes first, what is known from earlier runs last
    Part(name="device", title="The device", file="checks", seconds=10, run=rates.reached),
    Part(name="several_ranks", title="Several ranks on the device", file="checks", seconds=80, run=several_ranks.run),
    Part(name="host", title="Activations on the host", file="memory", seconds=50, run=host.run),
    Part(name="reserved", title="What the allocator reserves", file="memory", seconds=60, run=reserved.run),
    Part(name="ring", title="Blocks of ring attention", file="checks", seconds=20, run=ring.run),
    Part(name="generic", title="Techniques of any module", file="checks", seconds=25, run=generic.run),
    Part(
        name="language_model",
        title="A language model with each technique",
        file="memory",
        seconds=80,
        run=language_model.run,
    ),
    Part(name="exactness", title="Exactness of every technique", file="checks", seconds=50, run=exactness.run),
    Part(name="one_rank", title="One rank of the Trainer", file="trainer", seconds=15, run=trainer.one_rank),
    Part(name="budget", title="A budget, held by the allocator", file="trainer", seconds=10, run=trainer.budget),
    Part(name="zoo", title="Models of public libraries in bf16-mixed", file="checks", seconds=25, run=zoo.run),
    Part(name="memory", title="Memory, predicted and measured", file="memory", seconds=25, run=memory.run),
    Part(name="largest_batch", title="The largest batch", file="memory", seconds=25, run=language_model.largest_batch),
    Part(name="at_peak", title="What the peak holds", file="memory", seconds=10, run=memory.at_peak),
    Part(name="monitor", title="The memory monitor", file="trainer", seconds=5, run=trainer.monitor),
    Part(name="determinism", title="Two equal runs", file="trainer", seconds=5, run=trainer.determinism),
    Part(name="calibrate", title="Rates of the device", file="calibration", seconds=10, run=rates.calibrated),
    Part(name="kernels", title="Kernels and gaps", file="kernels", seconds=5, run=kernels.run),
    Part(name="loading", title="Waiting for cells", file="trainer", seconds=5, run=trainer.loading),
    Part(name="chunks", title="AutoChunk's models in chunks", file="speed", seconds=5, run=chunks.run),
    # it times as many cases as there are seconds, so it comes last
    Part(name="speed", title="Time and peak of heavy decoders", file="speed", seconds=5, run=speed.run),
)
"""By importance, for a run may end early; shares of the time, which are all of it."""


def main() -> None:
    """Run the parts, print what becomes of them, and exit by that."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script itself")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 or cpu")
    parser.add_argument("--only", help=f"some of the parts: {','.join(part.name for part in PARTS)}")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all parts, default %(default)s")
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[2], choices=(2, 4), help="processes that share the device, default 2"
    )
    arguments = parser.parse_args()
    names = arguments.only.split(",") if arguments.only else [part.name for part in PARTS]
    unknown = sorted(set(names) - {part.name for part in PARTS})
    if unknown:
        parser.error(f"--only {unknown!r} is not supported; parts are {[part.name for part in PARTS]!r}")
    parts = [part for part in PARTS if part.name in names]
    arguments.out.mkdir(parents=True, exist_ok=True)
    # a time limit from outside ends the run as Ctrl-C does
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    def after() -> None:
        write_report(arguments.out, parts, device=arguments.device, tiny=arguments.tiny)

    place = {"device": arguments.device, "tiny": arguments.tiny, "ranks": tuple(arguments.ranks)}
    runner = Runner(arguments.out, **place, seconds=arguments.seconds, after=after)
    try:
        ran = runner.run(parts)
    except KeyboardInterrupt:
        print(f"interrupted; what there is lies in {arguments.out / FILE}")
        sys.exit(INTERRUPTED)
    print(f"wrote {arguments.out / FILE}")
    sys.exit(0 if ran else 1)


if __name__ == "__main__":
    main()
