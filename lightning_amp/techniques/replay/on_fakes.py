"""Replay recorded operators in a count, on fake tensors: they make again what they made, and none of them runs.

An operator on fake tensors makes results of the same shapes and bytes each time. So a replay need not run it: the modes
that watch operators are told what it makes, and what is freed after it. Only the tensors that are needed afterwards
are made. A replay runs its operators where another mode watches them, or where something else may matter than shapes:
values that are known, results that values decide, and copies of what was written to.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_amp._torch import SOFTMAX_BACKWARD, FakeTensor, autograd_node, unseen
from lightning_amp.footprint.copies.known_values import recipe_of
from lightning_amp.footprint.copies.noted_values import answers_now
from lightning_amp.footprint.copies.quick_fakes import QuickFakes
from lightning_amp.footprint.live_bytes import Repeated, RepeatedResult
from lightning_amp.techniques.replay.recorded import Made, Operator, Outside, Slot, StorageRef, geometry_of

Values = dict[tuple[int, torch.dtype], Tensor]
"""Tensors by storage and dtype."""
_VIEW = Repeated(torch.ops.aten.as_strided.default)
"""How an operator gets a tensor of another geometry than the one that was made in its storage."""


def made_by(func: Any, found: Sequence[Tensor], slots: Sequence[int | None]) -> list[Made] | None:
    """Return what an operator has made on fake tensors; None if a replay has to run it."""
    made = list[Made]()
    for x, slot in zip(found, slots, strict=True):
        if slot is None or type(x) is not FakeTensor:
            return None
        made.append(Made(geometry_of(x), x.fake_device, recipe_of(x) is not None))
    return None if func in SOFTMAX_BACKWARD else made


def replayed_on_fakes(
    slots: Sequence[Slot],
    needed: Sequence[Operator],
    ends: Mapping[int, Sequence[int]],
    keep: Collection[int],
    values: Values,
    *,
    copies: bool,
) -> bool:
    """Replay operators without running them; return False if they have to run.

    Args:
        slots: Storages that the segment makes.
        needed: Its operators that are replayed, in order.
        ends: Storages that are not needed after an operator, by its index in `needed`.
        keep: Storages that are needed after the replay.
        values: Their tensors that still exist; those that are made are added.
        copies: Whether an operator gets another copy of what was copied before a write.
    """
    if autograd_node() is None or answers_now() is not None or any(one.made is None for one in needed):
        return False
    read = (one for operator in needed for one in operator.given if type(one) is Outside)
    if any(one.was_changed or (one.copied and not one.tensor.is_contiguous()) for one in read):
        return False
    if any(len(slots[slot].dtypes) > 1 for slot in keep):
        return False
    if any(
        made.known and slot in keep for one in needed for slot, made in zip(one.results, one.made or (), strict=True)
    ):
        return False
    with unseen() as modes:
        fakes = [mode for mode in modes if isinstance(mode, QuickFakes) and mode.valid]
        watching = [mode for mode in modes if mode not in fakes]
        # other modes need the operators themselves
        if len(fakes) != 1 or not all(getattr(mode, "counts_repeated", False) for mode in watching):
            return False
        steps, found = _steps(slots, needed, ends, keep, values, fakes[0], copies=copies)
        if any(tensor.untyped_storage().nbytes() != slots[slot].n_bytes for (slot, _), tensor in found.items()):
            return False
        values |= found
        for mode in watching:
            mode.repeated(steps)
    return True


def _steps(
    slots: Sequence[Slot],
    needed: Sequence[Operator],
    ends: Mapping[int, Sequence[int]],
    keep: Collection[int],
    values: Values,
    fake: QuickFakes,
    *,
    copies: bool,
) -> tuple[list[Repeated], Values]:
    """Return what the operators make and what is freed after each; and new tensors to be kept."""
    steps, found, alive = list[Repeated](), Values(), set[int]()
    there = {key: geometry_of(tensor) for key, tensor in values.items()}
    for i, operator in enumerate(needed):
        results, freed = dict[int, RepeatedResult](), list[int]()
        for one in operator.given:
            if type(one) is StorageRef and there[one.slot, one.geometry[0]] != one.geometry:
                steps.append(_VIEW)
            elif type(one) is Outside and one.copied and copies:
                # with a number that no storage of the segment has
                freed.append(-1 - len(freed))
                x = one.tensor
                copy = RepeatedResult(freed[-1], tuple(x.shape), x.dtype, x.nbytes, None)
                steps.append(Repeated(torch.ops.aten.clone.default, [x], [copy]))
        for slot, made in zip(operator.results, operator.made or (), strict=True):
            assert slot is not None, "it is known what the operator makes"
            dtype, shape, stride, _ = made.geometry
            key = slot, dtype
            # a result that is also read was written in place
            if slot not in operator.reads and slot not in results:
                tensor = None
                if key in there:
                    # it still exists, and is not needed twice
                    freed.append(slot)
                elif slot in keep:
                    found[key] = tensor = fake.new(shape, stride, dtype, made.device)
                else:
                    alive.add(slot)
                results[slot] = RepeatedResult(slot, shape, dtype, slots[slot].n_bytes, tensor)
            there.setdefault(key, made.geometry)
        for slot in ends.get(i, ()):
            if slot in alive:
                alive.discard(slot)
                freed.append(slot)
        given = [one.tensor for one in operator.given if type(one) is Outside]
        steps.append(Repeated(operator.func, given, list(results.values()), freed))
    return steps, found
