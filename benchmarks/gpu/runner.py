"""Parts of the run, each in a process of its own with a clock: what one breaks or uses up, the next does not see.

What a part has found is kept as JSON after every row, so that nothing is lost with what comes after it. Processes are
forked from one that has imported everything and asked nothing of CUDA; where a forked one cannot use the device, they
are spawned.
"""

import json
import logging
import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from lightning_amp.quantities import format_bytes

RUNNING, OK, SKIPPED, FAILED = "running", "ok", "skipped", "failed"
Row = dict[str, Any]
GRACE_S = 5.0
"""What a part may take longer than its clock says, before it is ended."""
LINES = 6
"""Of an error's traceback."""


class SkipPart(Exception):
    """A part cannot run here; the text says why."""


class Clock:
    """The seconds of a part, from when it is made."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self._end - time.monotonic()


class Record:
    """One part's entry in a file that several parts may share, one after the other.

    Args:
        path: The file; other parts' entries stay.
        part: Name of the part; an entry of the same name is begun anew.
    """

    def __init__(self, path: Path, part: str) -> None:
        self._path, self._part = path, part

    def begin(self) -> None:
        """Say that the part runs."""
        self._change({"status": RUNNING, "error": "", "facts": {}, "rows": [], "notes": []})

    def fact(self, **facts: Any) -> None:
        """Numbers or texts about the whole part."""
        entry = self.entry
        self._change(entry | {"facts": entry["facts"] | facts})

    def row(self, **values: Any) -> None:
        """One more row of the part's table; units are in the names, such as `peak_bytes`."""
        entry = self.entry
        self._change(entry | {"rows": [*entry["rows"], values]})

    def note(self, sentence: str) -> None:
        """One sentence for a person."""
        entry = self.entry
        self._change(entry | {"notes": [*entry["notes"], sentence]})

    def end(self, status: str, *, error: str = "", seconds: float | None = None) -> None:
        """Say how the part has ended."""
        known = {} if seconds is None else {"seconds": round(seconds, 2)}
        self._change(self.entry | {"status": status, "error": error} | known)

    @property
    def entry(self) -> dict[str, Any]:
        """What is kept of the part."""
        found: dict[str, Any] = read(self._path)[self._part]
        return found

    def _change(self, entry: dict[str, Any]) -> None:
        # put in place whole: a part may be killed at any moment
        aside = self._path.with_suffix(".partial")
        aside.write_text(json.dumps(read(self._path) | {self._part: entry}, indent=1))
        aside.replace(self._path)


def first_line(error: BaseException) -> str:
    """An error for a cell of a table."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The entries of a file, by part; none where there is no file."""
    if not path.exists():
        return {}
    found: dict[str, dict[str, Any]] = json.loads(path.read_text())
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What a part is given.

    Attributes:
        tiny: Whether sizes are those that a CPU runs in seconds.
        out: Folder of the results.
        ranks: Numbers of processes on the device, for parts that have several.
    """

    device: torch.device
    tiny: bool
    clock: Clock
    record: Record
    out: Path
    ranks: tuple[int, ...] = (2,)

    def has_time(self, what: str, seconds: float = 1.0) -> bool:
        """Whether the part's clock has so many seconds left for a case; notes that it was not reached."""
        if self.clock.left < seconds:
            self.record.note(f"{what}: not reached, the time was over.")
        return self.clock.left >= seconds

    def has_room(self, what: str, predicted: int, budget: int | None) -> bool:
        """Whether a case is predicted to fit; notes that it was not run. None is a device whose memory is not asked."""
        fits = budget is None or predicted <= budget
        if not fits and budget is not None:
            sizes = f"{format_bytes(predicted)} were predicted, and {format_bytes(budget)} may be used"
            self.record.note(f"{what}: not run, {sizes}.")
        return fits


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One part.

    Attributes:
        file: Its results lie in `file`.json.
        seconds: Its share of the time; what parts before have left comes on top.
        run: Raises SkipPart where it cannot run here, and any other error where it fails.
    """

    name: str
    title: str
    file: str
    seconds: float
    run: Callable[[Work], None]


class Runner:
    """Runs parts, one after the other, within a time for all of them.

    Args:
        out: Folder of the results.
        device: As torch names it.
        ranks: Numbers of processes on the device, for parts that have several.
        seconds: For all parts.
        after: Called after every part.
    """

    def __init__(
        self,
        out: Path,
        *,
        device: str,
        tiny: bool,
        seconds: float,
        after: Callable[[], None],
        ranks: tuple[int, ...] = (2,),
    ) -> None:
        self._out, self._after = out, after
        self._place = device, tiny, ranks
        self._clock, self._method = Clock(seconds), "fork"

    def run(self, parts: Sequence[Part]) -> bool:
        """Whether all parts had time and none has failed; an interrupt leaves what is written."""
        ran = [self._run(part, sum(late.seconds for late in parts[i + 1 :])) for i, part in enumerate(parts)]
        return all(ran)

    def _run(self, part: Part, later: float) -> bool:
        seconds = share(self._clock.left - GRACE_S, part.seconds, later)
        record, begin = Record(self._out / f"{part.file}.json", part.name), time.monotonic()
        record.begin()
        print(f"{part.title} ...", flush=True)
        try:
            if seconds > 0:
                self._in_process(part, record, seconds)
            else:
                record.end(SKIPPED, error="no time was left for it")
        except KeyboardInterrupt:
            record.end(FAILED, error="interrupted", seconds=time.monotonic() - begin)
            raise
        finally:
            self._after()
        entry = record.entry
        print(f"    {entry['status']} {entry['error']}".rstrip(), flush=True)
        return seconds > 0 and entry["status"] in (OK, SKIPPED)

    def _in_process(self, part: Part, record: Record, seconds: float) -> None:
        begin = time.monotonic()
        process = self._started(part, seconds)
        if process.exitcode is None:
            _end(process)
            error = f"it was ended after its {seconds:.0f} s; what is kept of it came before"
            record.end(FAILED, error=error, seconds=time.monotonic() - begin)
        elif self._method == "fork" and "forked subprocess" in record.entry["error"]:
            # something that was imported has asked for the device
            self._method = "spawn"
            record.begin()
            self._in_process(part, record, seconds)
        elif record.entry["status"] == RUNNING:
            error = f"its process ended with {process.exitcode}, without a word"
            record.end(FAILED, error=error, seconds=time.monotonic() - begin)

    def _started(self, part: Part, seconds: float) -> BaseProcess:
        """The process, once it has ended or its time is over."""
        sys.stdout.flush()
        context = multiprocessing.get_context(self._method)
        arguments = (part, self._out, *self._place, seconds)
        process = context.Process(target=_carry_out, args=arguments)
        process.start()
        try:
            process.join(seconds + GRACE_S)
        except BaseException:
            _end(process)
            raise
        return process


def _end(process: BaseProcess) -> None:
    # with the workers that it has started, which are of its group
    assert process.pid, "it was started"
    process.kill()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()


def share(left: float, own: float, later: float) -> float:
    """Seconds of a part: its own, with what those before have not used, and no more than are left.

    Args:
        left: Of all parts together.
        own: The part's.
        later: Of the parts that follow.
    """
    return min(left, max(own, left - later))


def _carry_out(part: Part, out: Path, device: str, tiny: bool, ranks: tuple[int, ...], seconds: float) -> None:
    os.setpgid(0, 0)
    record, begin = Record(out / f"{part.file}.json", part.name), time.monotonic()
    place = torch.device(device)
    if place.type == "cuda" and place.index is None:
        # a device without an index cannot be set
        place = torch.device("cuda", 0)
    warnings.simplefilter("ignore")
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        if place.type == "cuda":
            torch.cuda.set_device(place)
        part.run(Work(device=place, tiny=tiny, clock=Clock(seconds), record=record, out=out, ranks=ranks))
        record.end(OK, seconds=time.monotonic() - begin)
    except SkipPart as why:
        record.end(SKIPPED, error=str(why), seconds=time.monotonic() - begin)
    except BaseException as error:
        lines = "".join(traceback.format_exception(error)).strip().splitlines()
        record.fact(traceback=lines[-LINES:])
        record.end(FAILED, error=f"{type(error).__name__}: {error}", seconds=time.monotonic() - begin)
    sys.stdout.flush()
