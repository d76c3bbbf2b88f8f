"""Claim: a reason is said once, with all blocks that it is of and no other."""

from lightning_amp.costs.group_reasons import group_reasons


def test_reasons_are_said_once() -> None:
    alike = [(f"net.blocks.{k}", "it has hooks") for k in range(12)]
    assert group_reasons(alike) == "of net.blocks.0 to net.blocks.11 it has hooks"
    unlike = [
        *alike[:2],
        ("net.blocks.2", "it is compiled"),
        *alike[3:5],
        ("head", "it is compiled"),
        alike[0],
    ]
    assert group_reasons(unlike) == (
        "of net.blocks.0 to net.blocks.1 and net.blocks.3 to net.blocks.4 it has hooks; of net.blocks.2 and head it is"
        " compiled"
    )
    many = [(f"blocks.{k}", f"reason {k}") for k in range(5)]
    assert group_reasons(many).endswith("of blocks.2 reason 2; and 2 more reasons")
    assert group_reasons([]) == ""
