"""What a part of the run has found: kept as JSON after every row, so that nothing is lost with what comes after it."""

import json
import time
from pathlib import Path
from typing import Any

RUNNING, OK, SKIPPED, FAILED = "running", "ok", "skipped", "failed"
Row = dict[str, Any]


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


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The entries of a file, by part; none where there is no file."""
    if not path.exists():
        return {}
    found: dict[str, dict[str, Any]] = json.loads(path.read_text())
    return found
