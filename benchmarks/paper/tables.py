"""Tables 7 to 9, Figure 4 and Section 4.3 of the AMP paper, one simulated step for each figure, beside the paper's.

    python -m benchmarks.paper.tables [--only "leave one out" ...] [--quick] [--figure FILE] [--write]

No GPU is needed: every figure is one training step without values, as a GPU runs it, every byte counted. What the paper
does not state is chosen once, in benchmarks/paper/runs.py. *The paper's form* keeps the probabilities of every chunk of
attention for the backward pass; *ours* computes them again. Without S3 the paper has one masked matrix of all scores,
which the reference model never makes: it is registered here as S9, for counting bytes.

`--write` puts the tables into docs/reports/paper_tables.md. About an hour on 2 cores; with --quick (two rows, six
strata) a minute.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import lightning_amp
from benchmarks.page import ROOT, origin, paragraph, show_parts, table
from benchmarks.paper.runs import ALL, COARSE, FINE, GIB, OURS, Form, Setting, make_plan, without
from lightning_amp._torch import has_no_values
from lightning_amp.costs.model_shape import ModelShape
from lightning_amp.figures import simulated_memory
from lightning_amp.simulation.count_rank import RankResult
from lightning_amp.simulation.models_without_values import decoder_subject
from lightning_amp.simulation.simulate import simulate
from lightning_amp.techniques.table import STRATEGIES

PAGE, PART = ROOT / "docs" / "reports" / "paper_tables.md", "paper.tables"
THEIRS, GATHERED = Form(retain=True), Form(retain=True, gather=True)
FULL = f"{without('S3')},S9"
COLUMNS = ["paper", "the paper's form, simulated", "ours, simulated"]


@dataclass(frozen=True)
class FullMatrix:
    """One matrix of all scores."""


class FullMatrixAttention(nn.Module):
    """softmax(q k^T) values through one [N, N] matrix; `inner` makes queries, keys and values."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, q: Tensor, k: Tensor, values: Tensor) -> Tensor:
        """[N, D], without values."""
        assert has_no_values(q), "for counting bytes only: the mask is left out"
        queries, keys, values, *_ = self.inner.prepare(q, k, values)
        rows: Tensor = ((queries @ keys.T).softmax(-1) @ values)[: len(q)]
        return rows


def targets(shape: ModelShape) -> list[tuple[str, FullMatrix]]:
    """Every attention of the decoder."""
    assert shape.decoder is not None, "for a decomposed decoder"
    return [(f"{shape.decoder.fqn}.strata.*.key.attention", FullMatrix())]


def register() -> None:
    """Let plans ask for it; importing this file does not, for a process may have other uses of the library."""
    if "S9" not in STRATEGIES:
        lightning_amp.register_technique(
            "S9",
            title="full score matrix",
            shrinks="nothing: makes [N, N]",
            spec=FullMatrix,
            targets=targets,
            install=lambda module, spec, mesh: FullMatrixAttention(module),
        )


@cache
def run(setting: Setting, strategies: str, devices: int, form: Form = OURS) -> RankResult:
    """One step of the first rank, whose shards are the largest."""
    made = make_plan(setting, strategies, devices, form)
    return simulate(partial(decoder_subject, setting.decoder(), batch_size=1), made, rank=0, device_type="cuda")


def outcome(result: RankResult) -> str:
    """In the paper's words."""
    if result.failed_at is None:
        return f"completed, {result.peak_bytes / GIB:.2f} GiB"
    request = result.requested_bytes or 0
    asked = f", asked for {request / GIB:.1f} GiB at once" if request > GIB else ""
    return f"out of memory at {result.failed_at}{asked}"


def slope(result: RankResult) -> str:
    """Growth per stratum with attention."""
    held = result.strata_bytes
    return f"{(held[-1] - held[0]) / (len(held) - 1) / GIB:.2f} GiB" if len(held) > 1 else "-"


def ablation() -> Iterator[str]:
    """Table 7; status 1 where the paper's order does not come out."""
    eight = partial(run, COARSE, devices=8)
    theirs = {
        "S1-S5": eight(ALL, form=THEIRS),
        "without S5": eight(without("S5"), form=THEIRS),
        "without S4": eight(without("S4"), form=GATHERED),
        "without S3": eight(FULL),
        "without S2": eight(without("S2"), form=THEIRS),
    }
    paper = ["completed, 17.87 GB", "out of memory at stratum 16", "completed, 21.11 GB",
             "out of memory at stratum 1, ~48 GiB at once", "completed, 17.87 GB"]  # fmt: skip
    forms = {"without S4": Form(gather=True)}
    ours = [eight(ALL if name == "S1-S5" else without(name[-2:]), form=forms.get(name, OURS)) for name in theirs]
    # the first fails before the second and so on: after fewer strata, or, where all complete, with a higher peak
    order = [theirs[f"without {one}"] for one in ("S3", "S5", "S4", "S2")]
    ranks = [(len(result.strata_bytes), -result.peak_bytes) for result in order]
    if ranks != sorted(ranks):
        raise SystemExit(f"the order of the paper's ablation does not come out: {ranks!r}")
    rows = [[n, p, outcome(t), outcome(o)] for (n, t), p, o in zip(theirs.items(), paper, ours, strict=True)]
    yield from table(["strategies", *COLUMNS], rows)


def growth() -> Iterator[str]:
    """Section 4.3."""
    rows = [
        ["500 kb, 8 ranks, with S5", "0.56 GB", *(slope(run(COARSE, ALL, 8, form)) for form in (THEIRS, OURS))],
        ["500 kb, 8 ranks, without S5", "1.38 GB",
         *(slope(run(COARSE, without("S5"), 8, form)) for form in (THEIRS, OURS))],
        ["500 kb, one GPU, nothing installed", "22 GB at strata 18-19", outcome(run(COARSE, "S1", 1)), ""],
        ["100 kb, 4 ranks, with S5", "0.45 GB, 18.54 GB at stratum 31",
         *(slope(run(FINE, ALL, 4, form)) for form in (THEIRS, OURS))],
    ]  # fmt: skip
    yield from table(["", *COLUMNS], rows)


def heavy() -> Iterator[str]:
    """Tables 8 and 9, and pure S1."""
    published = {(COARSE, 4): "17.89 ± 0.15 GB", (COARSE, 8): "18.07 ± 0.14 GB"}
    published |= {(FINE, 4): "19.51 ± 0.67 GB", (FINE, 8): "15.52 ± 0.66 GB"}
    rows = list[list[str]]()
    for setting in (COARSE, FINE):
        rows.append([f"{setting.name}, one GPU", "out of memory", outcome(run(setting, "S1", 1)), ""])
        rows.append([f"{setting.name}, 4 GPUs, S1 only", "out of memory", outcome(run(setting, "S1", 4)), ""])
        for n in (4, 8):
            found = [outcome(run(setting, ALL, n, form)) for form in (THEIRS, OURS)]
            rows.append([f"{setting.name}, {n} GPUs, S1-S5", published[setting, n], *found])
    yield from table(["configuration", *COLUMNS], rows)


def quick() -> Iterator[str]:
    """Few strata."""
    few, rows = replace(COARSE, name="500 kb, 6 strata", strata=6), list[list[str]]()
    for name, strategies in (("S1-S5", ALL), ("without S3", FULL)):
        forms = [run(few, strategies, 8, form) for form in ((THEIRS, OURS) if strategies == ALL else (OURS,))]
        rows.append([f"{few.name}, {name}", "", *map(outcome, forms), *[""] * (2 - len(forms))])
    yield from table(["configuration", *COLUMNS], rows)


def draw(path: Path) -> None:
    """Figure 4."""
    theirs, planned = run(FINE, ALL, 4, THEIRS), make_plan(FINE, ALL, 4, THEIRS)
    simulated_memory(
        path,
        simulated_bytes=theirs.strata_bytes,
        predicted_bytes=planned.strata_bytes,
        peak_bytes=theirs.peak_bytes,
        failed_at=theirs.failed_at,
        budget_bytes=planned.budget_bytes,
        title="Figure 4: 100 kb, 32 strata, S1-S5 in the paper's form, 4 ranks",
        rank_label="rank 0",
    )


SECTIONS: dict[str, Callable[[], Iterator[str]]] = {
    "leave one out": ablation,
    "growth per stratum": growth,
    "heavy configurations": heavy,
}


def main() -> None:
    """Print or write the tables that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), help="these tables")
    parser.add_argument("--quick", action="store_true", help="two rows, six strata")
    parser.add_argument("--figure", type=Path, help="file for Figure 4, such as docs/reports/paper_figure4.png")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/reports/paper_tables.md")
    asked = parser.parse_args()
    register()
    sections = {"quick": quick} if asked.quick else {name: SECTIONS[name] for name in asked.only}

    def lines_of(name: str) -> list[str]:
        return [*paragraph(origin("python -m benchmarks.paper.tables --write")), *sections[name]()]

    parts = ((f"## {name}\n", f"{PART}.{name.replace(' ', '_')}", partial(lines_of, name)) for name in sections)
    show_parts(PAGE, parts, write=asked.write)
    if asked.figure:
        draw(asked.figure)


if __name__ == "__main__":
    main()
