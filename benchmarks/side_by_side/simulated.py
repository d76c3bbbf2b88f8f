"""Cases simulated: one step without values, every byte of a device and every byte handed to collectives counted."""

import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.side_by_side.cases import Case
from benchmarks.side_by_side.plans import plan_of
from benchmarks.side_by_side.subject import subject_of
from lightning_amp.footprint.live_bytes import tensors_of
from lightning_amp.footprint.module_profile import ACTIVATIONS, TEMPORARIES
from lightning_amp.quantities import format_bytes
from lightning_amp.simulation.count_rank import RankResult
from lightning_amp.simulation.simulate import simulate


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """What was simulated of a case, of the first, a middle and the last rank.

    Attributes:
        peak_bytes: Of the rank with the highest.
        decoder_bytes: The same without the batch, latents, parameters, their gradients of this step and of the last,
            and the optimiser's state.
        sent_bytes: Most bytes that a rank hands to collectives.
    """

    peak_bytes: int
    decoder_bytes: int
    sent_bytes: int


def simulate_case(case: Case) -> Simulated:
    """One case, in this process."""
    begin, plan = time.perf_counter(), plan_of(case)
    make = partial(subject_of, case.size.decoder(), batch_size=case.size.cells, graph=case.graph)
    ranks = sorted({0, case.ranks // 2, case.ranks - 1})
    results = [simulate(make, plan, rank=rank) for rank in ranks]
    batch_bytes = sum(t.nbytes for t in tensors_of(make().batch))
    worst = max(results, key=lambda result: result.peak_bytes)
    found = Simulated(
        peak_bytes=worst.peak_bytes,
        decoder_bytes=worst.breakdown[ACTIVATIONS] + worst.breakdown[TEMPORARIES] - batch_bytes,
        sent_bytes=max(_sent(result) for result in results),
    )
    seconds = time.perf_counter() - begin
    name = f"{case.size}, {case.ranks} ranks  {case.method.name:<44}"
    print(f"simulated  {name} {format_bytes(found.peak_bytes):>9} ({seconds:.0f} s)", flush=True)
    return found


def _sent(result: RankResult) -> int:
    return sum(result.comm_bytes.values())


def simulate_all(cases: Sequence[Case], *, processes: int) -> dict[Case, Simulated | str]:
    """Cases side by side, as nothing is timed; of one that fails, what it said."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_one_thread) as pool:
        running = {case: pool.submit(simulate_case, case) for case in cases}
        return {case: _found(case, future) for case, future in running.items()}


def _found(case: Case, future: Future[Simulated]) -> Simulated | str:
    error = future.exception()
    if error is None:
        return future.result()
    print(f"simulated  {case.size}, {case.ranks} ranks  {case.method.name} failed: {error!r}", flush=True)
    return repr(error)


def _one_thread() -> None:
    torch.set_num_threads(1)
