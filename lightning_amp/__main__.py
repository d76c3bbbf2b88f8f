"""Run the command line: `python -m lightning_amp VERB` is the same as `lightning-amp VERB`."""

import sys

from lightning_amp.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
