"""Claim: of the eight unedited modules too, a chain says the peak of every choice, and what is chosen fits."""

import pytest

from lightning_amp.footprint.chain.chain import peak_bytes
from lightning_amp.footprint.profile_module import profile_module
from lightning_amp.techniques.recompute.choose import choose
from tests.any_module import NAMES, make
from tests.footprint.test_chain_of import chain_of, choices, real_peak
from tests.techniques.recompute.test_recompute import recompute


@pytest.mark.full
@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_peak_of_a_choice_in_eight_modules(name: str) -> None:
    """All blocks are computed again, or some at random."""
    chain = chain_of(*make(name))
    assert chain.measured == "fake tensors", chain.reason
    # what follows the blocks, such as a head, cannot be computed again by itself
    assert [block.fixed for block in chain.blocks if block.fixed and not block.after] == []
    for names in choices(chain)[1::2]:
        module, batch = make(name)
        found = peak_bytes(chain, names)
        assert found == pytest.approx(real_peak(module, batch, names), rel=0.01), names
        recompute(module, names)
        # 2 kB: what batch norm's statistics need to be put back
        assert found == pytest.approx(profile_module(module, batch).peak_bytes, abs=2000), names


@pytest.mark.long
@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("wide_mlp", "gpt2")])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_what_is_chosen_trains_within_the_budget(name: str) -> None:
    module, batch = make(name)
    chain = chain_of(module, batch)
    budget = peak_bytes(chain, ()) * 3 // 4
    found = choose(chain, budget)
    assert len(found.recomputed) > 0
    assert real_peak(module, batch, found.recomputed) <= 1.01 * budget
