"""Mutants of the rescue after an end of memory, and of what watches other processes or forks them."""

from tests.mutant_table.row import L, Mutant

RESCUE = f"{L}/steps/rescue.py"
SAVED = "tests/lightning/strategy/test_rescue.py"
IN_CHUNKS = f"{SAVED} -m exhaustive"
ENDED = "tests/lightning/strategy/test_end_of_memory.py"

RESCUES = [
    Mutant("rescue", "state lost: buffers", RESCUE, "buffer.copy_(before)", "pass", SAVED),
    Mutant("rescue", "state lost: metrics", RESCUE, "vars(metric).update(state)", "pass", SAVED),
    Mutant(
        "rescue",
        "state lost: counters of the loop",
        RESCUE,
        "self._loop.optim_progress.load_state_dict(self._progress)",
        "pass",
        SAVED,
    ),
    Mutant("rescue", "random streams go on", RESCUE, "set_random_streams(self._random)", "pass", SAVED),
    Mutant(
        "rescue",
        "one rank only",
        RESCUE,
        "if largest(0.0, self._device):",
        "if largest(0.0, self._device) > 1:",
        SAVED,
    ),
    Mutant(
        "rescue",
        "no chunks where recompute is not enough",
        f"{L}/strategy/install_plan.py",
        'for more in (("recompute",), ("recompute", "chunk")):',
        'for more in (("recompute",), ("recompute",)):',
        IN_CHUNKS,
    ),
    Mutant(
        "rescue",
        "counted with the plan before installed",
        f"{L}/strategy/install_plan.py",
        "            # a step is counted of the module as it is, not of blocks that are computed again already\n"
        "            self._installed.undo()\n",
        "",
        IN_CHUNKS,
    ),
    Mutant("rescue", "plans without number", RESCUE, "self._left -= 1", "self._left -= 0", SAVED),
    Mutant(
        "rescue",
        "budget not checked",
        "lightning_amp/footprint/bounded_step.py",
        "if self._bounded and self._exceeds(n_bytes):",
        "if False:",
        SAVED,
    ),
    Mutant(
        "rescue",
        "a new plan is not counted",
        f"{L}/steps/counted_batches.py",
        "self._left = first_batches(self._module.trainer.accumulate_grad_batches)",
        "self._left = 0",
        ENDED,
    ),
    Mutant(
        "rescue",
        "no budget without a rescue",
        f"{L}/steps/counted_batches.py",
        "loop.run = run",
        "pass",
        ENDED,
    ),
    Mutant(
        "rescue",
        "an outer module is named",
        f"{L}/steps/end_of_memory.py",
        "for k in range(len(frames) - 1, -1, -1):",
        "for k in range(len(frames)):",
        ENDED,
    ),
    Mutant(
        "rescue",
        "kinds add up wrong",
        f"{L}/steps/end_of_memory.py",
        "before = meter.current",
        "before = 0",
        ENDED,
    ),
    Mutant(
        "rescue",
        "streams are not put back",
        "lightning_amp/footprint/guest.py",
        "        isolated_random_streams(),\n",
        "",
        "tests/lightning/first_look",
    ),
    Mutant(
        "faults",
        "the hook of a deep stack is not known",
        f"{L}/faults/activity.py",
        "hook=hook or _noted_hook(trainer),",
        "hook=hook,",
        "tests/lightning/faults/test_fault_parts.py -k deep_stack",
    ),
    Mutant(
        "verify",
        "a fork collects its parent's garbage",
        "lightning_amp/verification/workers.py",
        "with _collecting_nothing_of_ours() if forked else nullcontext():",
        "with nullcontext():",
        "tests/verification/test_verify.py -k forked_process",
    ),
]
