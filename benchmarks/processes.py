"""Runs of a benchmark in processes of their own, one for each rank."""

import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

LONGEST = 3600.0
"""Seconds of a run."""


class RunFailed(Exception):
    """A process of a run ended with an error; the text is its last line."""


def run_fresh(body: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """Call `body(rank, ranks, *args)` in new processes, connected by gloo; returns the results in the order of ranks.

    The processes are forks of one that has imported torch; they have one thread until `body` says otherwise.

    Raises:
        RunFailed: a rank has raised an error, or has given no answer
    """
    import pytest

    from tests.ranks import run_ranks

    # read by the process that is forked, which the first run starts
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        try:
            return run_ranks(body, ranks, Path(folder), *args, timeout=LONGEST, fresh=True)
        except pytest.fail.Exception as error:
            # stacks of other ranks may follow the first traceback
            lines = str(error).strip().splitlines()
            raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
            raise RunFailed((raised or lines[-1:])[0]) from error
