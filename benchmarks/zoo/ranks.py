"""Two ranks against one process, with each technique that has no need of a decoder, and with what the policy takes."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.modules.dropout import _DropoutNd

from benchmarks.zoo.one_run import Record, computes_in_float32, fit, said
from benchmarks.zoo.subject import Case, Made, made
from lightning_amp import verify
from lightning_amp.errors import AmpError
from lightning_amp.verification import verify as processes

SHARE = 0.4
"""Of the bytes of one process; half of its activations fit 60 %, so that data parallelism alone would be the plan."""
POLICY = f"policy at {SHARE:.0%}"
KINDS = ("S1", "fsdp", "sequence", "tensor3d", "pipeline", POLICY)
SECONDS = 900.0
"""On a machine with other work too."""


def without_dropout(make: Callable[[], Made]) -> Made:
    """Set every probability of dropout to 0, also of those that a module hands to a function."""
    network, *rest = make()
    for part in network.modules():
        if isinstance(part, _DropoutNd):
            part.p = 0.0
        for name, value in vars(part).items():
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)
    return network, *rest


def runs_of(case: Case, kinds: tuple[str, ...]) -> Iterator[Record]:
    """Yield what `verify` says of each: the largest relative error of a loss, gradient, parameter or buffer."""
    # ranks draw for their own samples, so that nothing would be equal
    case = case._replace(make=partial(without_dropout, case.make))
    module, batch = made(case, torch.float64)
    single = computes_in_float32(*made(case, torch.float64))
    for kind in kinds:
        options: dict[str, Any] = {"strategies": kind}
        if kind == "tensor3d":
            # else two ranks that split the batch may be faster, and no parameter would be split
            options["tensor_grid"] = (2, 1, 1)
        if kind == POLICY:
            options = {"device_memory": int(SHARE * fit(case, torch.float64, "SGD").peak)}
        try:
            # ranks are forks, which have imported the library already
            with patch.object(processes, "_is_interactive", return_value=True):
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
            "float32": single,
            "difference": max(row.error for row in found.rows),
            "worst": [f"{row.quantity}, {row.worst}: {row.error:.0e}" for row in found.rows if row.wrong],
            "suspects": [one.suspect for one in found.suspects],
        }
