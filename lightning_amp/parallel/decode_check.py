"""Whether a module decodes as techniques need it: S4 and S5 replace or split what it computes.

It is tried on a few scores of both signs, from 1e-6 to 1e5. Known limit: what it does with others is not seen.
"""

import torch
from torch import Tensor, nn

SCALES = (1.0, 2.0**-20, 2.0**13)
"""Of the examples; powers of two keep products exact."""


def decode_problem(decode: nn.Module) -> str:
    """Why a module is not (u key^T)[:, nodes], of all channels or as the sum over parts of them; "" if it is."""
    names = sorted(decode.state_dict())
    if names:
        return f"has the state {names!r}"
    for scale in SCALES:
        problem = _problem(decode, scale)
        if problem:
            return problem
    return ""


def _problem(decode: nn.Module, scale: float) -> str:
    # small integers are exact in any order of summation: a difference is a different function
    u, key = scale * torch.tensor([[1.0, -2.0], [-3.0, 5.0]]), torch.arange(10.0).view(5, 2)
    nodes = torch.tensor([3, 0, 3, 1])
    expected = (u @ key.T)[:, nodes]
    try:
        with torch.no_grad():
            whole = decode(u, key, nodes)
            parts = [decode(u[:, part], key[:, part], nodes) for part in (slice(0, 1), slice(1, 2))]
            added = parts[0] + parts[1]
    except Exception as error:
        return f"fails on a small example with {error!r}"
    for found, of in ((whole, "a small example"), (added, "the channels of a small example, one by one")):
        if not (isinstance(found, Tensor) and torch.equal(found, expected)):
            return f"returns {found!r} and not {expected!r} for {of}"
    return ""
