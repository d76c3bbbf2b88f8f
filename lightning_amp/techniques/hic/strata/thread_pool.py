"""Run strata in parallel worker threads that divide torch's CPU threads among them.

On a CPU, several matrix products at a time are faster than one product with several threads; other operators gain
nothing from more threads. Results are consumed in the order of the items, so that their sum is the same in every run.
It equals the sum of a sequential run with the same number of threads per item.

At most `workers` + 1 items are held at a time, each of them waiting, running or finished.

Autocast is passed on to the workers. The work stays on one thread if a torch mode sees every operator (a simulation, a
counter of bytes or of operations), if dropout is active, or if items share submodules: items would draw each other's
random numbers, or read each other's parameters.

Known limits: random numbers from other sources than dropout are detected afterwards and raise an error. Module hooks
run in the workers' threads, which torch's profiler does not record by default.
"""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor, nn

from lightning_amp._torch import AnyDropout, FakeTensor, is_watched
from lightning_amp.errors import InstallError

Item = TypeVar("Item")
Result = TypeVar("Result")


def workers_for(modules: Iterable[nn.Module], like: Tensor, *, most: int) -> int:
    """Number of modules that may run concurrently: at most `most`, and at most the number of threads."""
    parts = [part for module in modules for part in module.modules()]
    alone = (
        like.device.type != "cpu"
        or isinstance(like, FakeTensor)
        or is_watched()
        or len(set(map(id, parts))) < len(parts)
        or any(isinstance(part, AnyDropout) and part.training for part in parts)
    )
    return 1 if alone else max(1, min(most, torch.get_num_threads()))


def run_in_order(
    work: Callable[[Item], Result], items: Iterable[Item], take: Callable[[Result], object], *, workers: int
) -> None:
    """Call `take(work(item))` for every item; `take` runs in this thread, in the order of the items.

    With several workers (`workers_for`), `work` runs in other threads. Items are read lazily, at
    most one ahead of the workers.
    """
    if workers == 1:
        for item in items:
            take(work(item))
        return
    threads, drawn = torch.get_num_threads(), torch.get_rng_state()
    enabled, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    def run(item: Item) -> Result:
        # the autocast cache is shared by all threads, and cleared when one of them leaves autocast
        with torch.autocast("cpu", dtype, enabled, cache_enabled=False):
            return work(item)

    waiting = deque[Future[Result]]()
    share = max(1, threads // workers)
    pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(share,))
    try:
        for item in items:
            waiting.append(pool.submit(run, item))
            # one more item than workers, so that no worker is idle while `take` runs
            if len(waiting) > workers:
                take(waiting.popleft().result())
        while waiting:
            take(waiting.popleft().result())
    finally:
        pool.shutdown(cancel_futures=True)
        # set_num_threads in a worker also applies to later threads and to the BLAS library
        torch.set_num_threads(threads)
    if not torch.equal(drawn, torch.get_rng_state()):
        raise InstallError(
            f"{workers} strata cannot run at the same time: they draw random numbers, which would depend on the order"
            " in which they finish; set workers=1 in the plan's rule of 'stream', or leave 'stream' out"
        )
