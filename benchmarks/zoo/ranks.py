"""Two ranks against one process, with each technique that has no need of a decoder, and with what the policy takes."""

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.zoo.one_run import Record, fit, said
from benchmarks.zoo.subject import Case, made
from lightning_amp import verify
from lightning_amp.errors import AmpError

SHARE = 0.6
POLICY = f"policy at {SHARE:.0%}"
KINDS = ("S1", "fsdp", "sequence", "tensor3d", "pipeline", POLICY)
SECONDS = 300.0


def runs_of(case: Case, kinds: tuple[str, ...]) -> Iterator[Record]:
    """Yield what `verify` says of each: the largest relative error of a loss, gradient, parameter or buffer."""
    module, batch = made(case, torch.float64)
    for kind in kinds:
        options: dict[str, Any] = {"strategies": kind}
        if kind == POLICY:
            options = {"device_memory": int(SHARE * fit(case, torch.float64, "SGD").peak)}
        try:
            found = verify(module, batch, devices=2, steps=2, precisions=["float64"], timeout=SECONDS, **options)
        except AmpError as error:
            key = "crashed" if "was raised" in str(error) or "did not answer" in str(error) else "refused"
            yield {"kind": kind, key: said(error)}
            continue
        yield {
            "kind": kind,
            "plan": list(found.strategies),
            "mesh": list(found.mesh),
            "equal": found.ok,
            "difference": max(row.error for row in found.rows),
            "suspects": [one.suspect for one in found.suspects],
        }
