"""Run independent work in threads that each get a share of the process's threads.

A CPU gains less from several threads inside one product of matrices than from several products at a time, and nothing
in what is not a product. Results are taken in the order of the work, whichever is ready first, so that sums over them
are the same in every run, and the same as one after the other with as many threads inside each.

Held at most: as many pieces as there are workers, and the results of one more.

Threads carry autocast over; what else torch keeps by thread keeps the work on one: modes that see every operator (a
simulation, a counter of bytes or of operations). So do dropout and parts that the pieces share, because a piece would
draw another one's random numbers, or read its parameters.

Known limits: random numbers that are drawn in another way than by dropout are noticed afterwards, and refused; hooks on
the parts run in the workers' threads, of which torch's profiler shows nothing by default.
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


def workers_for(modules: Iterable[nn.Module], like: Tensor, *, asked: int) -> int:
    """How many of the modules may run side by side: at most `asked`, and no more than threads."""
    parts = [part for module in modules for part in module.modules()]
    alone = (
        like.device.type != "cpu"
        or isinstance(like, FakeTensor)
        or is_watched()
        or len(set(map(id, parts))) < len(parts)
        or any(isinstance(part, AnyDropout) and part.training for part in parts)
    )
    return 1 if alone else max(1, min(asked, torch.get_num_threads()))


def run_in_order(
    work: Callable[[Item], Result], items: Iterable[Item], take: Callable[[Result], object], *, workers: int
) -> None:
    """Call `take` with what `work` returns for every item, in the order of the items and in this thread.

    With several workers (`workers_for`) `work` runs in other threads; an item is drawn when a worker is about to be
    free.
    """
    if workers == 1:
        for item in items:
            take(work(item))
        return
    threads, drawn = torch.get_num_threads(), torch.get_rng_state()
    enabled, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    def run(item: Item) -> Result:
        # its cache is one for all threads, and a thread's end empties it
        with torch.autocast("cpu", dtype, enabled, cache_enabled=False):
            return work(item)

    waiting = deque[Future[Result]]()
    share = max(1, threads // workers)
    pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(share,))
    try:
        for item in items:
            waiting.append(pool.submit(run, item))
            # one more than can run: a worker that is done finds work while the oldest result is added up
            if len(waiting) > workers:
                take(waiting.popleft().result())
        while waiting:
            take(waiting.popleft().result())
    finally:
        pool.shutdown(cancel_futures=True)
        # a worker's setting is also that of threads that start later, and of the library of products
        torch.set_num_threads(threads)
    if not torch.equal(drawn, torch.get_rng_state()):
        raise InstallError(
            f"{workers} strata cannot run at the same time: they draw random numbers, which would depend on the order"
            " in which they finish; set workers=1 in the plan's rule of 'stream', or leave 'stream' out"
        )
