"""Predict the bytes that a rank of a pipeline has on the host, if what autograd keeps of a micro-batch waits there.

The pool of `offload` is filled in the order of the passes, without memory; a backward pass gives the buffers of its
micro-batch back.

Known limit: a storage that autograd drops in the forward pass counts until the backward pass.
"""

from lightning_amp.footprint.chain.passes import Passes
from lightning_amp.techniques.host_memory.host_pool import Buffer, HostPool
from lightning_amp.techniques.pipeline.schedule.stage_bytes import Pipeline, rest_window, segments_of, window_of


def host_bytes(pipeline: Pipeline, rank: int, small: Passes | None = None, *, pinned: bool = False) -> tuple[int, int]:
    """Return the bytes of a rank's pool, and the bytes that leave in a step.

    `small`: Passes of micro-batches with fewer samples than the largest, if the batch has any.
    `pinned`: Whether host memory is page-locked, as for a GPU.
    """
    own, last, order = segments_of(pipeline, rank), len(pipeline.ends) - 1, pipeline.orders[rank]
    stages = range(rank, len(pipeline.ends), len(pipeline.orders))

    def sizes_of(part: Passes) -> dict[int, list[int]]:
        to_the_end = not pipeline.at_once
        runs = ((stage, pipeline.runs[stage]) for stage in stages)
        windows = {
            stage: window_of(part, *run, to_the_end=to_the_end, alone=pipeline.alone, rank=own) for stage, run in runs
        }
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
    pool, left = HostPool(limit=None), 0

    def taken(sizes: list[int]) -> list[Buffer]:
        return [pool.take(n, real=False, pinned=pinned) for n in sizes]

    # a later step finds the buffers of the ones before, and may share them out otherwise
    for _ in range(2):
        held, begun, left = dict[tuple[int, int], list[Buffer]](), False, 0
        for now in order:
            at = now.stage, now.micro_batch
            if not now.backward:
                held[at] = taken(sizes[now.micro_batch][now.stage])
                left += sum(sizes[now.micro_batch][now.stage])
                continue
            if now.stage == last and not begun:
                begun = True
                left += sum(of_rest)
                for buffer in taken(of_rest):
                    pool.give(buffer)
            for buffer in held.pop(at):
                pool.give(buffer)
    return pool.n_bytes, left
