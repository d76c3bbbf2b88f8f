"""Count the operators and odd expressions of tests/sharding that sharded tensors compute exactly, refuse, or get wrong.

    python -m benchmarks.domain.operators [--ranks 2 3 4] [--list refused]

Parts are even on 2 ranks, uneven or with indices in any order on 3, and on 4 ranks over one axis or a grid of 2 x 2.
Each result and each gradient is compared with one process in float64; four minutes on two cores. Status 1 where one is
wrong.
"""

import argparse
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import torch.distributed as dist

from lightning_amp.sharding.splits import MeshAxis
from tests.ranks import run_ranks
from tests.sharding.test_operators import CASES, REST, grid_axes, judged, ways

TABLES = {"operators": CASES, "odd expressions": REST}
Judged = tuple[str, str, str, str]
"""Table, case, "exact", "refused" or "wrong", and why."""


def judge(rank: int, size: int) -> list[Judged]:
    """Every case in its own splits; the worst of them where there are several."""
    axis = MeshAxis("sequence", size, rank, dist.group.WORLD)
    grid = grid_axes(rank) if size == 4 else []
    found = list[Judged]()
    warnings.simplefilter("ignore")
    for name, table in TABLES.items():
        for i, case in enumerate(table):
            # on 2 ranks a second way splits another dim
            for splits, axes, _ in ways(i, case, size, axis, grid)[:1]:
                found.append((name, case.name, *judged(case, splits, axes)))
    return found


def main() -> None:
    """Print one line for each table and number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--list", choices=("refused", "wrong"), default="wrong", help="print these cases")
    asked = parser.parse_args()
    n_wrong = 0
    print("| ranks | table | cases | exact | refused | wrong |\n|---|---|---|---|---|---|")
    for size in asked.ranks:
        with tempfile.TemporaryDirectory() as folder:
            # a case is exact where it is so on every rank
            reports = zip(*run_ranks(judge, size, Path(folder), timeout=1500), strict=True)
        worst = [max(of_ranks, key=lambda one: one[2]) for of_ranks in reports]
        for name in TABLES:
            counts = Counter(kind for table, _, kind, _ in worst if table == name)
            n_wrong += counts["wrong"]
            cells = size, name, counts.total(), counts["exact"], counts["refused"], counts["wrong"]
            print("|", " | ".join(map(str, cells)), "|", flush=True)
        for table, name, kind, why in worst:
            if kind == asked.list:
                print(f"{size} ranks, {table}, {name!r}: {why}", file=sys.stderr)
    sys.exit(n_wrong > 0)


if __name__ == "__main__":
    main()
