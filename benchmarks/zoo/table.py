"""The tables of docs/reports/zoo.md, made of the records of a file."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.page import origin, paragraph, table, write_part
from benchmarks.zoo.ranks import KINDS
from lightning_amp.quantities import format_bytes, format_seconds

Record = dict[str, Any]
Runs = dict[str, Record]
"""Of a model: the record of every kind of fit."""
PART = "zoo"
MAIN, BUDGETS, LEAST, HAND, END = "SGD, float64", ("75%", "50%", "35%"), "least", "by hand", "end"
ROUNDING, OF_FLOAT32 = 1e-9, 1e-5
"""Relative differences after five steps in float64 up to which rounding explains them; the latter where the network
itself computes a part in float32."""
UNDER = 0.99
UNLIKE_HAND = "refused although checkpointing by hand fits"
FAILED = ("wrong", "over budget", "crashed")


def read(file: Path) -> list[Record]:
    """The records; none where there is no file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def latest(records: Iterable[Record]) -> dict[tuple[str, str], Runs]:
    """Of every model and run the last record of each kind; that a run has ended is forgotten when it goes on."""
    found: dict[tuple[str, str], Runs] = {}
    for record in records:
        runs = found.setdefault((record["model"], record["run"]), {})
        runs.pop(END, None)
        runs[record["kind"]] = record
    return found


def write(file: Path, page: Path, names: list[str]) -> None:
    """Put all tables into the page."""
    found = latest(read(file))
    main = {name: found[name, MAIN] for name in names if (name, MAIN) in found}
    absent = [name for name in names if name not in main]
    first = f"{origin('python -m benchmarks zoo --write')} Results are in `docs/reports/{file.name}`."
    lines = [*paragraph(first), "### Counts", "", *counts(main, absent)]
    lines += ["### Error of prediction", "", *errors(found)]
    lines += ["### Models", "", *models(main)]
    lines += ["### Refused, and why", "", *reasons(main)]
    ranks = list(on_ranks(found, names))
    lines += ["### On two ranks", "", *ranks] if ranks else []
    write_part(page, PART, lines)


def fits(runs: Runs) -> dict[str, Record]:
    """Those under a budget, the least among them."""
    return {kind: runs[kind] for kind in (*BUDGETS, LEAST) if kind in runs}


def verdict(record: Record, runs: Runs) -> str:
    """What a fit is counted as; in float32, where an optimizer may make much of rounding, exactness is not judged."""
    if record.get("kind") in ("plain", HAND, END):
        return record.get("ended") or ("does not run" if "crashed" in record else "done")
    if "refused" in record:
        hand, budget = runs.get(HAND, {}).get("measured"), record.get("budget")
        return UNLIKE_HAND if budget is not None and hand is not None and hand <= budget else "refused with the reason"
    if "crashed" in record:
        return "crashed"
    if "equal" in record:
        # `verify` asks for float64's rounding, also of a loss that is computed in float32
        return "to rounding" if record["equal"] or _of_float32(record) else "wrong"
    allowed = OF_FLOAT32 if runs.get("plain", {}).get("float32") else ROUNDING
    if "float32" not in record.get("run", MAIN) and not (record["difference"] <= allowed and record["draws"]):
        return "wrong"
    if record["budget"] is not None and record["measured"] > record["budget"]:
        return "over budget"
    return "bit by bit" if record["difference"] == 0 else "to rounding"


def _of_float32(record: Record) -> bool:
    return bool(record.get("float32")) and record["difference"] <= OF_FLOAT32


def counts(main: dict[str, Runs], absent: list[str]) -> Iterator[str]:
    """How many fits end how."""
    kinds = ("bit by bit", "to rounding", "refused with the reason", UNLIKE_HAND)
    kinds += FAILED
    found = {
        kind: Counter(verdict(runs[kind], runs) for runs in main.values() if kind in runs) for kind in (*BUDGETS, LEAST)
    }
    yield from table(["", *(f"budget {kind}" for kind in BUDGETS), "least", "all"], [
        [kind, *(str(column[kind]) for column in found.values()), str(sum(column[kind] for column in found.values()))]
        for kind in kinds
    ])  # fmt: skip
    libraries = Counter(name.split(": ")[0] for name in main)
    yield from paragraph(
        f"{len(main)} of {len(main) + len(absent)} models, of {len(libraries)} libraries: "
        f"{', '.join(f'{n} of {name}' for name, n in libraries.items())}."
    )
    ended = [f"{name} ({runs[END]['ended']})" for name, runs in main.items() if END in runs]
    if ended:
        yield from paragraph(f"Not finished: {'; '.join(ended)}.")
    if absent:
        groups: dict[str, list[str]] = defaultdict(list)
        for name in absent:
            groups[name.split(": ")[0]].append(name.split(": ")[1])
        listed = "; ".join(f"{library}: {', '.join(sorted(models))}" for library, models in groups.items())
        yield from paragraph(f"Not run in this file: {len(absent)} models. {listed}.")


def errors(found: dict[tuple[str, str], Runs]) -> Iterator[str]:
    """Predicted against measured, over all fits of the file."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for (_, run), runs in found.items():
        for record in runs.values():
            if "predicted" in record:
                groups["all"].append(record)
                groups[f"{run}"].append(record)
                groups[f"plan: {plan_of(record)}"].append(record)
    order = sorted(groups, key=lambda name: (name != "all", name.startswith("plan"), -len(groups[name])))
    header = [
        "fits",
        "n",
        "median",
        "95th percentile",
        "under-estimated by > 1 %",
        "over budget though predicted to fit",
    ]
    rows = []
    for name in order:
        apart = sorted(abs(one["predicted"] / one["measured"] - 1) for one in groups[name])
        under = sum(one["predicted"] < UNDER * one["measured"] for one in groups[name])
        over = sum(bool(one["budget"]) and one["measured"] > one["budget"] for one in groups[name])
        n = len(apart)
        rows.append(
            [
                name,
                str(n),
                f"{median(apart):.2%}",
                f"{apart[min(n - 1, int(0.95 * n))]:.2%}",
                f"{under} ({under / n:.1%})",
                str(over),
            ]
        )
    yield from table(header, rows)


def plan_of(record: Record) -> str:
    """Short, for a cell."""
    return "+".join(record["plan"]) or "nothing"


def models(main: dict[str, Runs]) -> Iterator[str]:
    """A line for each model, in the order of libraries."""
    letters = letter_of(main)

    def cell(record: Record | None, plain: Record, runs: Runs) -> str:
        if record is None:
            return ""
        if "refused" in record:
            needs = f" {record['needs'] / plain['measured']:.0%}" if record.get("needs") else ""
            return f"refused{needs} ({letters[reason(record)]})"
        if "crashed" in record:
            return f"**crashed**: {record['crashed'].split(':')[0]}"
        bold = "**over** " if verdict(record, runs) == "over budget" else ""
        ratio = f"{record['predicted'] / record['measured']:.3f}"
        return f"{bold}{plan_of(record)} {ratio} x{record['step'] / record['plain step']:.2f}"

    rows = []
    for name, runs in sorted(main.items()):
        plain = runs.get("plain")
        if plain is None:
            continue
        hand, least = runs.get(HAND, {}), runs.get(LEAST, {})
        share = f"{least['measured'] / plain['measured']:.0%} " if "measured" in least else ""
        rows.append([
            name,
            f"{format_bytes(plain['measured'])}, {1 - plain['held'] / plain['measured']:.0%}",
            format_seconds(plain["plain step"]),
            *(cell(runs.get(kind), plain, runs) for kind in BUDGETS),
            share + cell(runs.get(LEAST), plain, runs),
            of_hand(hand, plain),
            exactness(runs),
            planning(runs),
        ])  # fmt: skip
    header = ["model", "plain", "step", *BUDGETS, "least", "by hand", "exact", "planning"]
    yield from table(header, rows)


def of_hand(hand: Record, plain: Record) -> str:
    """Bytes and time of checkpointing by hand, by those of a plain step."""
    if "measured" in hand:
        return f"{hand['measured'] / plain['measured']:.0%} x{hand['step'] / hand['plain step']:.2f}"
    return "fails" if hand else ""


def exactness(runs: Runs) -> str:
    """Of all fits of a model."""
    done = [one for one in runs.values() if "difference" in one]
    if not done:
        return ""
    worst = max(one["difference"] for one in done)
    says = f"{worst:.0e}{' (float32)' if worst > ROUNDING else ''}" if worst else "bits"
    return f"**wrong** {says}" if "wrong" in {verdict(one, runs) for one in done} else says


def planning(runs: Runs) -> str:
    """Seconds, the median over budgets."""
    seconds = [one["planning"] for one in fits(runs).values() if one.get("planning") is not None]
    return format_seconds(median(seconds)) if seconds else ""


def reason(record: Record) -> str:
    """The first sentence of a refusal with its way out, without bytes."""
    text = record["refused"].partition(": ")[2]
    text = re.split(r"(?<=[a-z)'])[.] ", text)[0]
    return re.sub(r"\d[\d,.]* ([KMG]i)?B\b", "N", text).replace("|", "/").replace("\n", " ")


def letter_of(main: dict[str, Runs]) -> dict[str, str]:
    """Of every reason, those that are met most first."""
    found = Counter(reason(one) for runs in main.values() for one in fits(runs).values() if "refused" in one)
    return {text: str(k + 1) for k, (text, _) in enumerate(found.most_common())}


def reasons(main: dict[str, Runs]) -> Iterator[str]:
    """A line for each reason."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, runs in main.items():
        for kind, one in fits(runs).items():
            if "refused" in one:
                found[reason(one)].append(f"{name} at {kind}")
    rows = (
        [letter, text, str(len(found[text])), ", ".join(found[text][:3])] for text, letter in letter_of(main).items()
    )
    yield from table(["", "reason", "fits", "such as"], rows)


def on_ranks(found: dict[tuple[str, str], Runs], names: list[str]) -> Iterator[str]:
    """A line for each model that was run on two ranks."""
    rows = [(name, found[name, "ranks"]) for name in names if (name, "ranks") in found]

    def cell(one: Record | None) -> str:
        if one is None:
            return ""
        if "equal" in one:
            says = f"{one['difference']:.0e}"
            if verdict(one, {}) == "wrong":
                says = f"**differs** {says} {', '.join(one['suspects'])}"
            elif not one["equal"]:
                says += " (float32)"
            return f"{plan_of(one)} {says}"
        key = "refused" if "refused" in one else "crashed"
        return f"{key}: {one[key].partition(': ')[2].split('. ')[0].split(';')[0][:90]}".replace("|", "/").replace(
            "\n", " "
        )

    if rows:
        yield from table(["model", *KINDS], ([name, *(cell(runs.get(kind)) for kind in KINDS)] for name, runs in rows))
