"""Every table and figure of the AMP paper's evaluation that can be predicted without a GPU, next to ours.

    python -m benchmarks.paper [--only NAME ...] [--write]

`--write` puts the tables into docs/paper/amp.md. Ten seconds of a processor. Nothing is run: bytes are those of the
memory model, seconds those of the time model at the rates of an RTX 3090.
"""

from benchmarks.page import ROOT, asked_tables, origin, show_tables
from benchmarks.paper.growth import gathered, outcomes, settings, solved
from benchmarks.paper.seconds import heavy, light, scale, scaling

PAGE, PART = ROOT / "docs" / "paper" / "amp.md", "paper"
SECTIONS = {
    "Table 6, light configurations": light,
    "Tables 8 and 9, seconds": heavy,
    "Table 9, speed-up": scaling,
    "Tables 7 to 9 and Figure 4, memory": outcomes,
    "Growth by stratum, a + b / R": solved,
    "Growth by stratum, settings tried": settings,
    "Table 7, without S4": gathered,
    "Scale of computation, Hi-C to RNA": scale,
}
"""Heading of every part, and its table."""


def main() -> None:
    """Print or write the tables."""
    asked = asked_tables(__doc__, PAGE, SECTIONS)
    show_tables(asked, PAGE, PART, SECTIONS, first=origin("python -m benchmarks.paper --write"))


if __name__ == "__main__":
    main()
