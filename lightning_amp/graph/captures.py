"""Captures of several calls: one for equal signatures, and one for blocks that differ in plain attributes alone.

The layers of a model often differ by a number, such as that of the layer, which most of them do nothing with. A call
whose signature differs in nothing else is followed along the captures that there are (calls.py). If it calls the same
functions with the same arguments, and does nothing for which a capture would be refused, its graph is theirs.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightning_amp._torch import SharedFakeMode, failures_unlogged, tree_flatten
from lightning_amp.footprint.copies.fake_copy import copy_of
from lightning_amp.footprint.copies.restore_state import forgetting
from lightning_amp.graph.capture import CannotCapture, Capture, NoPython, capture, copied_objects, runs_again, watched
from lightning_amp.graph.guards import described, settings_of, signature, state_of, without_plain_settings


class Captures:
    """Captures by class and signature.

    Args:
        follows: Whether a call that differs from a captured one in plain attributes is followed along that capture.
    """

    def __init__(self, *, follows: bool = False) -> None:
        self._known: dict[Any, Capture] = {}
        self._alike: dict[Any, list[Capture]] = {}
        self._follows = follows

    def of(self, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Capture:
        """Return the capture for a call; it is made on the first call with its signature."""
        key = signature(block, args, kwargs)
        if key not in self._known:
            alike = self._alike.setdefault(without_plain_settings(key), []) if self._follows else []
            found = next((replace(one, key=key) for one in alike if _goes_along(block, args, kwargs, one)), None)
            if found is None:
                found = capture(block, args, kwargs, key=key)
                alike += [found] if found.graph is not None else []
            self._known[key] = found
        return self._known[key]


def _goes_along(block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], known: Capture) -> bool:
    """Whether a call goes along a capture, and a capture of its own would not be refused."""
    values, spec = tree_flatten((tuple(args), dict(kwargs)))
    seed = torch.get_rng_state()
    try:
        with failures_unlogged(), warnings.catch_warnings(action="ignore"), forgetting(block) as outside:
            twin, objects = copy_of(block, SharedFakeMode(allow_non_fake_inputs=True)), copied_objects(values)
            given = [objects.get(i, value) for i, value in enumerate(values)]
            before, held = settings_of(twin), [described(value, states=True) for value in objects.values()]
            with watched(NoPython(())):
                remembers = runs_again(twin, state_of(block), given, spec, known.calls)
            same = before == settings_of(twin) and held == [described(v, states=True) for v in objects.values()]
            same = same and torch.equal(seed, torch.get_rng_state())
    except CannotCapture:
        return False
    finally:
        torch.set_rng_state(seed)
    return same and remembers == known.remembers and (remembers or not outside.differs)
