"""Keyed numbers are functions of key, stream and column alone, and look random."""

import torch

from lightning_amp.models.keyed_noise import KeyedDropout, keyed_normal, keyed_uniform

KEYS = torch.arange(20_000) * 97 + 5


def test_known_values():
    # the numbers of a stored run must not change with the code: these are fixed for good
    found = keyed_uniform(torch.tensor([0, 1, 2**31 - 1]), 2, stream=3)
    expected = torch.tensor(
        [
            [0.49986428022384644, 0.7196202874183655],
            [0.9822743535041809, 0.08112186193466187],
            [0.7407624125480652, 0.16769284009933472],
        ]
    )
    assert torch.equal(found, expected)


def test_a_row_depends_on_its_key_only():
    whole = keyed_normal(KEYS, 7, stream=1)
    order = torch.randperm(len(KEYS), generator=torch.Generator().manual_seed(0))
    assert torch.equal(keyed_normal(KEYS[order], 7, stream=1), whole[order])
    assert torch.equal(keyed_normal(KEYS[:3], 4, stream=1), whole[:3, :4])


def test_dropout_by_key():
    x, draw = torch.ones(2000, 50), torch.arange(2000)
    layer = KeyedDropout(0.2, stream=0)
    dropped = layer(x, draw)
    assert set(dropped.unique().tolist()) == {0.0, 1.25}
    assert abs(dropped.mean() - 1) < 1e-2
    assert torch.equal(dropped[7:9], layer(x[:2], draw[7:9]))
    assert not torch.equal(dropped, KeyedDropout(0.2, stream=1)(x, draw))
    assert torch.equal(layer.eval()(x, draw), x)
