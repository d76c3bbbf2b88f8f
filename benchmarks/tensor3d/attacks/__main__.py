"""Train harmless-looking modules on grids of 2 and 4 ranks, and compare each with one process, in float64.

The functions of ranks are in run_attacks.py: processes that are started cannot import a package's `__main__`.
"""

from benchmarks.tensor3d.attacks.run_attacks import main

if __name__ == "__main__":
    main()
