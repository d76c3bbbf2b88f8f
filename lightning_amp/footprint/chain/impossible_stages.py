"""Describe why the blocks of a recorded step cannot be pipeline stages.

impossible      in however many micro-batches
skips           what crosses a block without being its result
drawn_before    random numbers that every micro-batch would draw anew
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_amp.footprint.module_profile import GRADIENTS, PARAMETERS, STATE


def impossible(step: Any, names: Sequence[str]) -> str:
    """Return why blocks cannot be stages, in however many micro-batches; "" if no such reason was detected."""
    if inside := step.transformed.intersection(names):
        return (
            f"torch.func (vmap, grad, jvp, ...) transforms a function that calls the block {min(inside)!r}, which a"
            " stage would have to leave half-way: call the blocks outside of it"
        )
    if copied := step.copied.intersection(names):
        return (
            f"the step makes a copy of the block {min(copied)!r} (copy.deepcopy, as for a target network), which has no"
            " values on the ranks of other blocks: make the copy in __init__"
        )
    gone_back = [name for name in names if any(f"{fqn}.".startswith(f"{name}.") for fqn in step.went_back)]
    if gone_back:
        return (
            "the step takes gradients while it runs (torch.autograd.grad, as for a gradient penalty, or torch.func),"
            f" and goes back through the block {gone_back[0]!r}, which other ranks hold the rest of: compute such a"
            " term without gradients of blocks"
        )
    for walk in step.walks if step.records_calls_of(names) else ():
        walked = [name for name in walk if name in set(names)]
        if walked != list(names):
            unlike = next((a for a, b in zip(walked, names, strict=False) if a != b), "")
            return (
                f"the step has to walk the blocks {names[0]!r} to {names[-1]!r} once, in order, and called"
                f" {len(walked)!r} of {len(names)!r}" + (f", {unlike!r} out of turn" if unlike else "")
            )
    calls = calls_of(step, names)
    if not names or len(calls) != len(names):
        return ""
    return _reads_others(step, calls)


def calls_of(step: Any, names: Sequence[str]) -> list[Any]:
    """Return the calls of blocks with gradients; one for each block if there are as many, for they are in order."""
    return [call for call in step.calls if call.fqn in set(names)]


def skips(step: Any, calls: Sequence[Any]) -> str:
    """Describe a tensor that crosses a block without being one of its results; "" if there is none."""
    ends = np.array([call.end for call in calls])
    for life in step.lives:
        if id(life) not in step.of_blocks or life.kind in (PARAMETERS, GRADIENTS, STATE):
            continue
        made = int(np.searchsorted(ends, life.birth))
        read = step.read_last.get(id(life), 0)
        if read >= len(step.work) or step.work[read][0] != step.work[life.birth][0]:
            continue
        reader = int(np.searchsorted(ends, read))
        if reader > made and all(life is not output for output in calls[reader - 1].outputs):
            what = f"{life.name} of {life.fqn!r}" if life.fqn else life.name
            who = f"block {calls[reader].fqn!r}" if reader < len(calls) else "what follows the blocks"
            return f"{who} reads {what}, which an earlier block has computed, and the block before it does not return"
    return ""


def drawn_before(step: Any, calls: Sequence[Any]) -> str:
    """Return why random numbers rule out micro-batches, which would draw different ones; "" if they do not."""
    for life in step.lives:
        if id(life) in step.drawn and id(life) not in step.of_blocks and life.birth < calls[0].start:
            read = step.read_last.get(id(life), 0)
            if calls[-1].end < read < len(step.work) and step.work[read][0] == step.work[life.birth][0]:
                return "what follows the blocks reads random numbers that the step draws before them"
    return ""


def _reads_others(step: Any, calls: Sequence[Any]) -> str:
    """Describe a parameter of one block that another one reads; "" if there is none."""
    for name, block in step.read_beside.items():
        homes = homes_of(step, calls, name)
        readers = readers_of(step, calls, name) - homes - {len(calls)}
        if readers and None not in homes:
            reader = calls[min(readers)].fqn
            return (
                f"block {reader!r}, or what precedes it, reads the parameter {name!r} of block {block!r}, which another"
                " rank may hold: read it in its own block, or after all blocks"
            )
    return ""


def homes_of(step: Any, calls: Sequence[Any], name: str) -> set[int | None]:
    """Return the blocks that contain a parameter, under any of its names; with None if it is also outside of blocks."""
    names = step.names_of_parameters.get(name, (name,))
    return {next((i for i, call in enumerate(calls) if n.startswith(f"{call.fqn}.")), None) for n in names}


def readers_of(step: Any, calls: Sequence[Any], name: str) -> set[int]:
    """Return the segments that read a parameter."""
    ends = [call.end for call in calls]
    return set(np.searchsorted(ends, step.readers.get(name, ()), side="left").tolist())
