"""Modules that nobody wrote for lightning_amp, trained on two ranks by `strategy="amp"` and by what else one can do.

    python -m benchmarks.any_module [--quick] [--only NAME ...] [--write]

Peak and time of every module of examples/any_module, unedited, for ddp, torch's `activation_memory_budget`, FSDP2 and
recomputed blocks written by hand, and for amp: without a budget, and with the peak of every peer that needs less than
ddp, for at equal bytes it is to be as fast. "plain" is one process with the rows of one rank. Ratios are of the time of
as many samples; the last column has the lines that a person writes.

A run is a new process for each rank, a fork of one that has imported torch, of one thread. Bytes are exact; times are
medians of the steps of one run. `--write` puts the table into docs/reports/any_module.md as it grows. Modules whose
packages are not there are left out, and named. About an hour on two quiet cores, with --quick 10 minutes.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec

from benchmarks.any_module.by_hand import lines_of
from benchmarks.any_module.one_run import Found, Wanted, run
from benchmarks.page import ROOT, origin, write_as_it_grows
from lightning_amp.progress import track
from lightning_amp.quantities import format_bytes, format_seconds
from tests.any_module import NAMES

PAGE, PART = ROOT / "docs" / "reports" / "any_module.md", "any_module.peers"
QUICK = ("gene_transformer", "evoformer", "wide_mlp")
SIZES: dict[str, dict[str, int]] = {
    "gene_transformer": {"cells": 16, "length": 512},
    "geneformer": {"cells": 16, "length": 256},
    "gpt2": {"texts": 16, "length": 128},
    "vit": {"images": 16},
    "unet": {"images": 16, "side": 64},
    "evoformer": {"samples": 4, "side": 64},
    "wide_mlp": {"cells": 64},
    "cnn": {"samples": 32, "length": 2048},
}
"""At which products take longer than Python; the first is the number of rows."""
TIMED = 12
LESS = 0.97
"""Share of ddp's peak from which on a peer saves something."""
KEPT = (0.8, 0.5, 0.2, 0.0)
"""Settings of `activation_memory_budget`, shares of activations."""
HEADER = ["module", "by", "peak", "step", "ratio", "plan", "lines of code"]
FIRST = "ddp"
UNUSED = "ddp_find_unused_parameters_true"


def peer_rows(names: list[str], *, quick: bool) -> Iterator[list[str]]:
    """A row for every module and peer."""
    for name in track(names, description="peers", total=len(names)):
        asked, found = _once(name, quick=quick)
        for peer, one in found.items():
            yield [name, peer, *_results(one, found[FIRST]), str(lines_of(asked[peer].by_hand))]


def _once(name: str, *, quick: bool) -> tuple[dict[str, Wanted], dict[str, Found]]:
    """Every peer once, then amp with the peaks that they had."""
    rows, *others = SIZES[name].items()
    base = Wanted(name=name, ranks=2, sizes=SIZES[name], strategy=FIRST, steps=TIMED)
    asked = {
        "plain": replace(base, ranks=1, strategy="auto", sizes={rows[0]: rows[1] // 2, **dict(others)}),
        FIRST: base,
        "ddp, blocks recomputed by hand": replace(base, by_hand="recompute"),
        **{
            f"ddp, activation_memory_budget {share}": replace(base, by_hand=share)
            for share in (KEPT[1:2] if quick else KEPT)
        },
        "FSDP2 by hand": replace(base, strategy="fsdp2", by_hand="fsdp2"),
        "FSDP2, blocks recomputed by hand": replace(base, strategy="fsdp2", by_hand="both"),
        "amp": replace(base, strategy={}),
    }
    found = {}
    for peer, wanted in asked.items():
        found[peer] = run(wanted)
        if found[peer].refused and wanted.strategy == FIRST:
            # a module some of whose parameters get no gradient needs the other ddp
            asked[peer] = replace(wanted, strategy=UNUSED)
            found[peer] = run(asked[peer])
    whole = found[FIRST].peak
    for peer in list(found):
        if peer != "plain" and not found[peer].refused and found[peer].peak < LESS * whole:
            of = f"amp with the bytes of: {peer}"
            asked[of] = replace(base, strategy={"device_memory": found[peer].peak})
            found[of] = run(asked[of])
    return asked, found


def _results(one: Found, first: Found) -> list[str]:
    if one.refused or one.step is None or first.step is None:
        return ["", "", "", first_sentence(one.refused)]
    peak = f"{format_bytes(one.peak)} ({one.peak / first.peak:.0%})"
    # ranks of a model axis have one batch where those of a data axis have one each
    as_many = one.step * one.plan.get("mesh", {}).get("model", 1)
    return [peak, format_seconds(one.step), f"{as_many / first.step:.2f}", one.strategies]


def first_sentence(error: str) -> str:
    """For a cell of a table."""
    return error.split(". ")[0].splitlines()[0].replace("|", "/") if error else ""


def available(names: list[str]) -> list[str]:
    """Names whose packages are there; the others are said."""
    files = {name: (ROOT / "examples" / "any_module" / f"{name}.py").read_text() for name in names}
    absent = [name for name in names if "transformers" in files[name] and find_spec("transformers") is None]
    if absent:
        print(f"left out, for they need the package transformers: {', '.join(absent)}")
    return [name for name in names if name not in absent]


def main() -> None:
    """Measure, and print or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three modules, one activation_memory_budget")
    parser.add_argument("--only", nargs="+", choices=NAMES, help="these modules")
    parser.add_argument("--write", action="store_true", help="put the table into docs/reports/any_module.md")
    asked = parser.parse_args()
    names = available(asked.only or list(QUICK if asked.quick else NAMES))
    command = f"python -m benchmarks.any_module{' --quick' * asked.quick} --write"
    first = f"{origin(command)} Bytes of the second step; the most of any rank."
    write_as_it_grows(PAGE, PART, first, HEADER, peer_rows(names, quick=asked.quick), write=asked.write)


if __name__ == "__main__":
    main()
