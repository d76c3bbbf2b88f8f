"""Check that all ranks save together: a save by one rank alone would deadlock.

Every rank counts its saves in the store of the process group and waits until all others have counted as many. Some
requests to the store per save, no collective.
"""

import time

import torch.distributed as dist

# the store has no public name
from lightning_amp._torch import default_store
from lightning_amp.errors import AmpError

PATIENCE_S = 600.0
"""How far ranks may be apart: they have taken the same step before, but one may have more to do after a validation."""
PATIENCE_AFTER_ERROR_S = 5.0
"""The same once this rank has failed: the others fail with it, or will never come."""
POLL_S = 0.02


def wait_for_all(*, rank: int, ranks: int, failed: bool = False) -> None:
    """Return once every rank has come here as often as this one.

    Args:
        rank, ranks: This rank of so many.
        failed: Whether this rank's run has failed, and a callback saves what there is.

    Raises:
        AmpError: Others have not come within `PATIENCE_S`, or after an error the shorter time; the error is then its
            context.
    """
    if ranks == 1 or not dist.is_initialized():
        return
    store = default_store()
    mine = store.add(_key(rank), 1)
    patience = PATIENCE_AFTER_ERROR_S if failed else PATIENCE_S
    deadline = time.monotonic() + patience
    missing = list(range(ranks))
    while missing := [other for other in missing if store.add(_key(other), 0) < mine]:
        if time.monotonic() > deadline:
            store.add(_key(rank), -1)
            raise AmpError(
                f"rank {rank} saves a checkpoint, and ranks {missing!r} did not within {patience:g} s; "
                "every rank has to, because some hold a part of it. Call trainer.save_checkpoint on "
                "every rank: only one writes the file"
            )
        time.sleep(POLL_S)


def _key(rank: int) -> str:
    return f"lightning_amp/saves/{rank}"
