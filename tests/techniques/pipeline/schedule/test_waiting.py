"""No schedule comes to a halt where a stage waits for its last gradients to arrive before it sends the next ones."""

import pytest

from lightning_amp.techniques.pipeline.schedule.schedules import Order, Pass, fills_rounds, schedule


def runs_to_its_end(orders: tuple[Order, ...], stages: int) -> bool:
    """Run the passes of all ranks, each as soon as what it waits for is there."""
    at = [0] * len(orders)
    begun, done, sent = set[Pass](), set[Pass](), dict[int, Pass]()
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            if at[rank] == len(order):
                continue
            now = order[at[rank]]
            backward, stage, j = now
            begun.add(now)
            last = backward and stage == stages - 1
            needs = Pass(False, stage, j) if last else Pass(backward, stage + (1 if backward else -1), j)
            if needs.stage >= 0 and needs not in done:
                continue
            # its last gradients arrive once the stage before waits for them
            if backward and stage and stage in sent and sent[stage] not in begun:
                continue
            if backward and stage:
                sent[stage] = Pass(True, stage - 1, j)
            done.add(now)
            at[rank] += 1
            moved = True
    return all(place == len(order) for place, order in zip(at, orders, strict=True))


@pytest.mark.parametrize(("name", "each"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)])
def test_stages_wait_for_gradients_to_arrive(name: str, each: int) -> None:
    for ranks in range(2, 7):
        for count in (1, 2, 3, 4, 8, 12, 24):
            if fills_rounds(name, ranks, count):
                assert runs_to_its_end(schedule(name, ranks, count, stages_per_device=each), each * ranks)
