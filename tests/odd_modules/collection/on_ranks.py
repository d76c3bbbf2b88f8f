"""Train rows of the collection on ranks, and judge what all of them have found together."""

import gc
import logging
import pickle
import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_amp._torch import tree_map
from lightning_amp.errors import AmpError
from lightning_amp.lightning.faults.failure_watch import FailureWatch
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from tests.odd_modules.collection.row import IN_EVERY_PASS, NO_LIST, WRONG, Row
from tests.odd_modules.collection.run import BOUND, RANKS_DIFFER, Warned, apart, has_blocks, tensors_of, trained
from tests.odd_modules.collection.tables import ROWS

Found = dict[str, Tensor] | str
MOVED = "; and it has changed "
"""In the message of a module whose state is not as it was when it was refused."""
UNNAMED = "training step fails with"
"""In a message: an error of torch or of Python follows."""
LATER = (
    IN_EVERY_PASS,
    "changed the parameters or buffers",
    "reads a parameter that another rank holds",
    "a mean over samples of nan",
)
"""In messages that a pipeline gives after what they name: of writes of the step itself, of a hook after the first step,
and of a later batch, of which a micro-batch has no label that counts.
"""
PATIENCE_S = 15
"""For ranks that wait for one that is refused."""


def part_of(batch: Any, which: int, parts: int) -> Any:
    """Some rows of all tensors of a batch."""
    return tree_map(lambda x: x.tensor_split(parts)[which] if isinstance(x, Tensor) else x, batch)


def on_rank(
    rank: int, ranks: int, folder: Path, names: list[str], options: Mapping[str, Any], parts: int
) -> dict[str, Found]:
    """What a rank has trained of each row, or why it has not.

    Args:
        options: Of the strategy.
        parts: Parts of a batch, of which neighbouring ranks have the same.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.ERROR)
    found: dict[str, Found] = {}
    dist.barrier()
    for name in names:
        # a rank that is refused leaves the others, whose next message fails; the watch would end the process
        dist.destroy_process_group()
        gc.collect()
        store, patience = dist.FileStore(f"{folder}/{name}", ranks), timedelta(seconds=PATIENCE_S)
        store.set(f"rank {rank}", "has ended the row before")
        store.wait([f"rank {other}" for other in range(ranks)], timedelta(seconds=8 * PATIENCE_S))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=patience)
        row, made = ROWS[name], list[tuple[Any, dict[str, Tensor]]]()

        def make(row: Row = row, made: list[Any] = made) -> Any:
            module = row.make().double()
            made.append((module, {key: value.clone() for key, value in tensors_of(module).items()}))
            return module

        n = 1 if row.by_rows else parts
        own = partial(part_of, which=rank * n // ranks, parts=n)
        with patch.object(FailureWatch, "tell", lambda *_: None):
            try:
                one = trained(
                    replace(row, make=make),
                    AMPStrategy(**options),
                    part=own,
                    gradients="tensor3d" not in options["strategies"],
                    rank=rank,
                    ranks=ranks,
                )
                # what cannot be written to a file is refused too
                found[name] = pickle.loads(pickle.dumps(one))
            except (AmpError, Warned) as error:
                found[name] = str(error).replace(f"on rank {rank}", "on a rank")
                ((module, before),) = made
                # of another rank's blocks a run that has ended has no values
                held = [(k, v) for k, v in tensors_of(module).items() if k in before and not v.isnan().any()]
                if moved := [key for key, value in held if not torch.equal(value, before[key])]:
                    found[name] += f"{MOVED}{moved}"
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
    return found


def judged_together(name: str, way: str, found: list[Found], right: dict[str, Tensor], parts: int) -> str:
    """What is wrong with the outcomes of all ranks; "" if they are what the row says.

    Args:
        way: A technique, and where it splits, as in "tensor3d over x".
    """
    row, technique = ROWS[name], way.split()[0]
    nothing = NO_LIST if technique == "pipeline" and not has_blocks(row) else ""
    said = row.says.get(way, row.says.get(technique, nothing))
    refused = [one for one in found if isinstance(one, str)]
    if refused:
        # of what one rank has found the others learn by a message that fails; the first one warns
        enough = len(refused) == len(found) or RANKS_DIFFER in refused[0]
        later = any(words in said or words in refused[0] for words in LATER)
        if technique == "pipeline" and not later and any(MOVED in one for one in refused):
            enough = False
        # all ranks say the same, in words of the library
        if technique == "tensor3d" and (len({*refused}) > 1 or UNNAMED in refused[0]):
            enough = False
        if enough and said and any(re.search(said, one, re.DOTALL) for one in refused):
            return ""
        return f"ranks say {[one if isinstance(one, str) else 'trained' for one in found]!r}"
    # over z no features are split
    if said and said != WRONG and way != "tensor3d over z":
        return f"trained, and the row says {said!r}"
    runs = [one for one in found if not isinstance(one, str)]
    # random numbers are others than those of one process, wherever a rank has a part of a tensor, or of the blocks
    right = runs[0] if row.drawn and parts == 1 else right
    right = {key: value for key, value in right.items() if _is_compared(key, technique, parts)}
    if missing := [key for key in right if not any(key in run for run in runs)]:
        return f"{missing[0]!r} is on no rank"
    for rank, run in enumerate(runs):
        own = {key: run[key] for key in right if key in run}
        if why := apart(own, {key: right[key] for key in own}, BOUND):
            return "" if said == WRONG else f"rank {rank}: {why}"
    return "exact, and the row says that it is not" if said == WRONG else ""


def _is_compared(key: str, technique: str, parts: int) -> bool:
    """Whether it is the same on all ranks as on one process.

    Under tensor3d a rank has parts of gradients, which show in the state. Losses and logs of data ranks are of their
    rows.
    """
    if key.startswith("drawn by") or (technique == "tensor3d" and "gradient" in key):
        return False
    return parts == 1 or not (key.endswith("loss") or key.startswith("logged"))
