"""Predict the bytes that a rank of a pipeline has on the host, if what autograd keeps of a micro-batch waits there.

Buffers are given and taken back as by the pool of `offload`: a storage takes the smallest free one that holds it, and a
backward pass gives those of its micro-batch back.

Known limit: a storage that autograd drops in the forward pass counts until the backward pass.
"""

from bisect import bisect_left, insort

from lightning_amp.footprint.chain.passes import Passes
from lightning_amp.techniques.pipeline.schedule.stage_bytes import Pipeline, rest_window, segments_of, window_of


def host_bytes(pipeline: Pipeline, rank: int, small: Passes | None = None) -> tuple[int, int]:
    """Return the bytes of a rank's pool, and the bytes that leave in a step.

    `small`: Passes of micro-batches with fewer samples than the largest, if the batch has any.
    """
    own, last, order = segments_of(pipeline, rank), len(pipeline.ends) - 1, pipeline.orders[rank]
    stages = range(rank, len(pipeline.ends), len(pipeline.orders))

    def sizes_of(part: Passes) -> dict[int, list[int]]:
        to_the_end = not pipeline.at_once
        runs = ((stage, pipeline.runs[stage]) for stage in stages)
        windows = {stage: window_of(part, *run, to_the_end=to_the_end, rank=own) for stage, run in runs}
        return {stage: part.n_bytes[window.leaves].tolist() for stage, window in windows.items()}

    large, rows, count = sizes_of(pipeline.part), pipeline.whole.rows, 1 + max(now.micro_batch for now in order)
    fewer = large if small is None else sizes_of(small)
    # as `cut` deals samples
    sizes = [
        large if (j + 1) * rows // count - j * rows // count == pipeline.part.rows else fewer for j in range(count)
    ]
    of_rest = list[int]()
    if pipeline.at_once and last in stages:
        of_rest = pipeline.whole.n_bytes[rest_window(pipeline.whole, rank=own).leaves].tolist()
    pool, left, free = 0, 0, list[int]()

    def taken(n_bytes: int) -> int:
        nonlocal pool
        place = bisect_left(free, n_bytes)
        if place < len(free):
            return free.pop(place)
        pool += n_bytes
        return n_bytes

    # a later step finds the buffers of the ones before, and may share them out otherwise
    for _ in range(2):
        held, begun, left = dict[tuple[int, int], list[int]](), False, 0
        for now in order:
            at = now.stage, now.micro_batch
            if not now.backward:
                held[at] = [taken(n) for n in sizes[now.micro_batch][now.stage]]
                left += sum(sizes[now.micro_batch][now.stage])
                continue
            if now.stage == last and not begun:
                begun = True
                left += sum(of_rest)
                for buffer in [taken(n) for n in of_rest]:
                    insort(free, buffer)
            for buffer in held.pop(at):
                insort(free, buffer)
    return pool, left
