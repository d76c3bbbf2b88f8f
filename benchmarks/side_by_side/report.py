"""The comparison as a document: goals, tables, pictures, and how all of it was found."""

from collections.abc import Iterator

from benchmarks.decoders import Size
from benchmarks.page import empty_part, origin, paragraph, table
from benchmarks.side_by_side import pictures
from benchmarks.side_by_side.cases import EAGER, OURS, OURS_ALONE, Case
from benchmarks.side_by_side.fresh_process import Measured
from benchmarks.side_by_side.goals import Results, goals
from benchmarks.side_by_side.simulated import Simulated
from benchmarks.side_by_side.suite import ALONE, SPLIT, TWO_RANKS
from lightning_amp.quantities import format_bytes

ALONE_HEADER = ["method", "memory", "of eager", "step", "times as fast", "of matmul peak", "off by"]
RANKS_HEADER = ["method", "ranks x threads", "memory per rank", "step", "sent per rank", "off by"]


MEANINGS = {
    "exact": (
        "*off by* is the larger relative difference of the first step's loss, and of its gradient of the "
        "anchors' latents along one random direction, from the eager decoder (where it was not run, from ours "
        "on one device), in float32"
    ),
    "eager": (
        "the reference decoder with the attention of the `local-attention` package; D is 128, the window 20 "
        "anchors per stratum (HiGLUE's default), and 2 % of the counts are not zero"
    ),
    "HiGLUE": (
        "its own answers: strata computed again in the backward pass; or some of the anchors only, which is "
        "another loss"
    ),
    "measured": (
        "in new processes with a fixed number of threads; those that a goal compares take turns in several "
        "rounds, and the median counts"
    ),
    "step": "forward pass, backward pass and reduction of gradients of the decoder, of the slowest rank",
    "memory above start": (
        "the high-water mark of a process's resident memory over its training steps, less what it held at the "
        "start, with the parameters, the latents and the batch in memory"
    ),
    "simulated": "a training step by `lightning-amp simulate`; of several ranks the highest counts",
    "the decoder's part": "of the peak: without batch, latents, parameters, gradients and the optimizer's state",
    "matmul peak": (
        "FLOP of the products of matrices of one eager step, over the time of the method and the rate of a "
        "product of two square matrices of 2,048 in the same run"
    ),
}


def document(results: Results, *, quick: bool) -> str:
    """The whole document as Markdown.

    Args:
        results: What was found.
        quick: Whether sizes are the small ones.
    """
    lines = [*_introduction(results, quick=quick), *_goals(results), *_alone(results), *_ranks(results)]
    lines += [*_measured_growth(results), *_simulated_growth(results), *_whole_steps(), *_method()]
    return "\n".join(lines).rstrip() + "\n"


def _introduction(results: Results, *, quick: bool) -> Iterator[str]:
    yield "# One device against eight"
    yield ""
    command = f"python -m benchmarks.side_by_side{' --quick' if quick else ''}"
    yield from paragraph(origin(command))
    yield from paragraph(f"""*Ours* is {" + ".join(OURS)}, with `strata` or `nodes` on several ranks.""")
    rates = ", ".join(f"{rate / 1e9:.0f} GFLOP/s with {n}" for n, rate in sorted(results.matmul_rate.items()))
    yield from paragraph(f"Products of matrices reach {rates} threads in the same run.")
    if quick:
        yield from paragraph(
            """**These are the small sizes of `--quick`, at which goals are only looked at; run it without
            `--quick` for the sizes of the goals.**"""
        )


def _goals(results: Results) -> Iterator[str]:
    yield "## Goals"
    yield ""
    rows = [[goal.what, goal.target, goal.found, goal.answer] for goal in goals(results)]
    yield from table(["", "goal", "found", "reached"], rows)


def _alone(results: Results) -> Iterator[str]:
    suite = results.suite
    yield "## One device, two threads"
    yield ""
    for size in suite.varied_cells():
        rows = [_alone_row(results, suite.alone(size, method), size) for method in ALONE]
        yield f"{size}:"
        yield ""
        yield from table(ALONE_HEADER, [row for row in rows if row])
    yield from _picture(pictures.CELLS, "Time and memory against the number of cells.")


def _alone_row(results: Results, case: Case, size: Size) -> list[str]:
    if case not in results.measured:
        return []
    found, eager = results.of(case), results.of(results.suite.alone(size, EAGER))
    if found is None or eager is None:
        return [case.method.name, _failure(results, case), *[""] * (len(ALONE_HEADER) - 2)]
    share = results.share_of_peak(case)
    return [
        case.method.name,
        format_bytes(round(found.peak_bytes)),
        f"1/{eager.peak_bytes / found.peak_bytes:.1f}",
        f"{found.seconds:.2f} s",
        f"{eager.seconds / found.seconds:.2f}",
        "" if share is None or case.method.part < 1 else f"{100 * share:.0f} %",
        _off_by(results, case),
    ]


def _ranks(results: Results) -> Iterator[str]:
    suite = results.suite
    yield "## Several ranks, one thread each"
    yield ""
    for size in dict.fromkeys((suite.base, suite.over_strata, suite.over_nodes)):
        cases = [suite.split_over(size, EAGER, 1), suite.split_over(size, OURS_ALONE, 1)]
        cases += [suite.split_over(size, method, 2) for method in (*TWO_RANKS, SPLIT[-1])]
        yield f"{size}:"
        yield ""
        yield from table(RANKS_HEADER, [_ranks_row(results, case) for case in cases if case in results.measured])
    yield from paragraph(
        """DDP and FSDP2 give every rank half of the cells, and each computes all keys. *Sent* is what a rank hands to
        collectives in a step."""
    )
    yield from _picture(pictures.RANKS, "Memory and communication of a rank against the number of ranks, simulated.")


def _ranks_row(results: Results, case: Case) -> list[str]:
    where = f"{case.ranks} x {case.threads}"
    found = results.of(case)
    if found is None:
        return [case.method.name, where, _failure(results, case), "", "", ""]
    sent = format_bytes(found.sent_bytes) if case.ranks > 1 else ""
    memory = format_bytes(round(found.peak_bytes))
    return [case.method.name, where, memory, f"{found.seconds:.2f} s", sent, _off_by(results, case)]


def _measured_growth(results: Results) -> Iterator[str]:
    suite = results.suite
    yield "## Growth, measured"
    yield ""
    yield "One device, two threads: memory above start, and time of a step."
    yield ""
    sizes = dict.fromkeys([*suite.varied_strata(), *suite.varied_anchors(), *suite.varied_cells()])
    rows = []
    for size in sizes:
        both = [_both(results.of(suite.alone(size, method))) for method in (EAGER, OURS_ALONE)]
        rows.append([str(size), *both])
    yield from table(["", EAGER.name, OURS_ALONE.name], rows)


def _both(found: Measured | None) -> str:
    return "" if found is None else f"{format_bytes(round(found.peak_bytes))}, {found.seconds:.2f} s"


def _simulated_growth(results: Results) -> Iterator[str]:
    suite = results.suite
    yield "## Growth, simulated"
    yield ""
    yield "Peak of a training step on one device, all bytes: parameters, optimiser, batch and decoder."
    yield ""
    sizes = dict.fromkeys([*suite.simulated_by_strata(), *suite.simulated_by_anchors()])
    methods = suite.simulated_methods
    yield from table(
        ["", *(method.name for method in methods)],
        [[str(size), *(_peak(results, Case(size=size, method=m)) for m in methods)] for size in sizes],
    )
    yield from _picture(pictures.STRATA, "Memory against the number of strata.")
    yield from _picture(pictures.ANCHORS, "Memory against the number of anchors.")
    yield f"Peak of a rank, and bytes that it hands to collectives, {suite.split}:"
    yield ""
    rows = [[OURS_ALONE.name, "1", _peak(results, Case(size=suite.split, method=OURS_ALONE)), ""]]
    for method in SPLIT:
        for ranks in suite.ranks:
            found = results.simulation(Case(size=suite.split, method=method, ranks=ranks))
            numbers = (found.peak_bytes, found.sent_bytes) if found else ()
            rows.append([method.name, str(ranks), *(map(format_bytes, numbers) if numbers else ("failed", ""))])
    yield from table(["method", "ranks", "peak", "sent"], rows)


def _peak(results: Results, case: Case) -> str:
    found = results.simulated.get(case)
    if isinstance(found, Simulated):
        return format_bytes(found.peak_bytes)
    return "" if found is None else f"failed: {found}"


def _whole_steps() -> Iterator[str]:
    yield "## Whole training steps"
    yield ""
    yield "How these times grow with cells, bins, strata and ranks: [Growth](growth.md)."
    yield ""
    yield from empty_part("training.whole_step")


def _method() -> Iterator[str]:
    yield "## How it was found"
    yield ""
    yield from table(["word", "meaning"], [[word, meaning] for word, meaning in MEANINGS.items()])


def _picture(name: str, caption: str) -> Iterator[str]:
    yield f"![{caption}]({name})"
    yield ""
    yield f"*{caption}*"
    yield ""


def _off_by(results: Results, case: Case) -> str:
    found = results.off_by(case)
    if case.method.part < 1:
        return "not exact"
    return "" if found is None else f"{'**wrong** ' if case in results.wrong() else ''}{found:.0e}"


def _failure(results: Results, case: Case) -> str:
    found = results.measured.get(case, "not run")
    return f"failed: {found}" if isinstance(found, str) else ""
