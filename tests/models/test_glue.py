"""GLUE trains on one device without any help, its losses add up over cells, and its checkpoints stand alone."""

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_amp.errors import ModelError
from lightning_amp.models.glue import GLUE
from lightning_amp.models.graph_encoder import GraphEncoder
from lightning_amp.models.inputs import GraphInputs, ModalityInputs, ModelInputs, StrataInputs
from lightning_amp.models.latents import alignment_loss
from tests.any_module import QUIET

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:.*isinstance\(treespec, LeafSpec\):FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
]
SMALL = {
    "latent_dim": 8,
    "hidden_dim": 16,
    "window": 3,
    "edges_per_step": 32,
    "discriminator_dim": 16,
    "discriminator_depth": 1,
}
N_ANCHORS, NODES, DISTANCES, N_GENES = 9, [list(range(9)), list(range(8)), list(range(7))], [0, 1, 2], 5
N_HIC = 24


def inputs(modalities=("hic", "rna")):
    anchors, genes = np.arange(N_ANCHORS), N_ANCHORS + np.arange(N_GENES)
    known = {
        "hic": ModalityInputs(n_features=N_HIC, n_batches=2, vertices=anchors),
        "rna": ModalityInputs(n_features=N_GENES, n_batches=1, vertices=genes),
    }
    n = N_ANCHORS + N_GENES
    source = np.concatenate((np.arange(n), np.arange(N_ANCHORS - 1), genes))
    target = np.concatenate((np.arange(n), np.arange(1, N_ANCHORS), np.arange(N_GENES)))
    graph = GraphInputs(
        n_vertices=n,
        source=source,
        target=target,
        weight=np.linspace(0.2, 1, len(source)).astype(np.float32),
        sign=np.ones(len(source), dtype=np.float32),
    )
    strata = StrataInputs(n_anchors=N_ANCHORS, nodes=[np.array(n) for n in NODES], distances=list(DISTANCES))
    return ModelInputs(
        modalities={name: known[name] for name in modalities},
        strata=strata if "hic" in modalities else None,
        graph=graph,
    )


def cells(n, n_features, *, n_batches, seed):
    generator = torch.Generator().manual_seed(seed)
    rates = torch.rand(n_features, generator=generator) * 4
    x = torch.poisson(rates.expand(n, -1), generator=generator) + (torch.arange(n_features) == 0)
    return {
        "x": x,
        "library": x.sum(1, keepdim=True),
        "batch": torch.arange(n) % n_batches,
        "index": torch.arange(n),
        "draw": torch.randint(2**31, (n,), generator=generator),
    }


def batch(n=8, seed=0):
    return {"hic": cells(n, N_HIC, n_batches=2, seed=seed), "rna": cells(n, N_GENES, n_batches=1, seed=seed + 1)}


def part(batch, rows):
    return {m: {k: t[rows] for k, t in fields.items()} for m, fields in batch.items()}


def to_double(batch):
    return {
        m: {k: t.double() if t.is_floating_point() else t for k, t in fields.items()} for m, fields in batch.items()
    }


def trainer(tmp_path, **settings):
    return pl.Trainer(accelerator="cpu", default_root_dir=tmp_path, **QUIET, **settings)


class Batches(pl.LightningDataModule):
    """A few whole batches; the trainer's progress does not depend on workers or a sampler."""

    def __init__(self, n_steps=4):
        super().__init__()
        self.steps = [batch(8, seed=10 * i) for i in range(n_steps)]

    def train_dataloader(self):
        return DataLoader(self.steps, batch_size=None)

    val_dataloader = predict_dataloader = train_dataloader


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def generator_gradient(model, batch):
    model.zero_grad(set_to_none=True)
    torch.manual_seed(5)  # of the vertices' noise and of the edges: the same for every part
    latents = model.latents(batch)
    model.terms(batch, latents, shown=model.shown(batch, latents))["loss"].backward()
    return [p.grad for n, p in model.named_parameters() if not n.startswith("discriminator.")]


def discriminator_gradient(model, batch):
    model.zero_grad(set_to_none=True)
    shown = model.shown(batch, model.latents(batch))
    alignment_loss(model.discriminator, {m: u.detach() for m, u in shown.items()}, frozen=False).backward()
    return [p.grad for p in model.discriminator.parameters()]


@pytest.mark.parametrize("gradient", [generator_gradient, discriminator_gradient])
@pytest.mark.parametrize("key", ["attention", "convolution"])
def test_gradient_of_a_batch_is_the_cell_weighted_mean_over_its_parts(gradient, key):
    model = GLUE(**SMALL, key=key).build(inputs()).double()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm1d):
            module.eval()
    whole = to_double(batch(8))
    expected = gradient(model, whole)
    first = gradient(model, part(whole, slice(0, 3)))
    second = gradient(model, part(whole, slice(3, 8)))
    assert any(e is not None and e.abs().max() > 1e-6 for e in expected)
    for e, a, b in zip(expected, first, second, strict=True):
        torch.testing.assert_close(3 / 8 * a + 5 / 8 * b, e, rtol=1e-9, atol=1e-14)


def test_loss_is_the_sum_of_its_terms():
    weights = {"lam_data": 1.5, "lam_kl": 0.7, "lam_graph": 0.3, "lam_align": 0.4}
    model = GLUE(**SMALL, **weights, modality_weights={"rna": 2.0}).build(inputs())
    cells_of = batch()
    latents = model.latents(cells_of)
    t = model.terms(cells_of, latents, shown=model.shown(cells_of, latents))
    data = t["nll_hic"] + 0.7 * t["kl_hic"] + 2 * (t["nll_rna"] + 0.7 * t["kl_rna"])
    graph = 2 * (t["nll_graph"] + 0.7 * t["kl_graph"])
    torch.testing.assert_close(t["loss"], 1.5 * data + 0.3 * graph - 0.4 * t["alignment"])


def test_pretraining_and_single_modalities_have_no_adversary():
    for model in (GLUE(**SMALL, stage="pretrain").build(inputs()), GLUE(**SMALL).build(inputs(("rna",)))):
        cells_of = {m: c for m, c in batch().items() if m in model.encoders}
        assert model.shown(cells_of, model.latents(cells_of)) == {}


def test_validation_weighs_cells_and_draws_nothing(tmp_path):
    model = GLUE(**SMALL, lam_graph=0.0).build(inputs())
    whole = batch(8)
    uneven = [part(whole, slice(0, 3)), part(whole, slice(3, 8))]
    run = trainer(tmp_path)
    (once,) = run.validate(model, DataLoader([whole], batch_size=None), verbose=False)
    (parts,) = run.validate(model, DataLoader(uneven, batch_size=None), verbose=False)
    only_hic = [uneven[0], {"hic": uneven[1]["hic"]}]
    (missing,) = run.validate(model, DataLoader(only_hic, batch_size=None), verbose=False)
    assert once["val_loss"] == pytest.approx(parts["val_loss"], rel=1e-5)
    assert missing["val_loss"] != pytest.approx(parts["val_loss"], rel=1e-5)
    model.eval()
    state = torch.get_rng_state()
    without_keys = {m: {k: t for k, t in fields.items() if k != "draw"} for m, fields in whole.items()}
    model.on_validation_epoch_start()
    model.validation_step(without_keys, 0)
    model.edge_nll(model.vertices()[0], torch.Generator().manual_seed(0))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_resumed_run_draws_what_the_uninterrupted_one_would(tmp_path):
    """Noise of vertices and sampled edges included, whatever else the process has drawn in between."""
    torch.manual_seed(3)
    whole, first = GLUE(**SMALL).build(inputs()), GLUE(**SMALL).build(inputs())
    first.load_state_dict(whole.state_dict())
    trainer(tmp_path, max_epochs=2).fit(whole, datamodule=Batches(2))
    run = trainer(tmp_path, max_epochs=1)
    run.fit(first, datamodule=Batches(2))
    run.save_checkpoint(tmp_path / "half.ckpt")
    torch.manual_seed(4)
    second = GLUE(**SMALL).build(inputs())
    trainer(tmp_path, max_epochs=2).fit(second, datamodule=Batches(2), ckpt_path=tmp_path / "half.ckpt")
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(second.state_dict()[name], value, rtol=1e-5, atol=1e-7, msg=name)
    assert not torch.equal(first.state_dict()["graph_encoder.embedding"], whole.state_dict()["graph_encoder.embedding"])


def test_checkpoint_stands_alone(tmp_path):
    model = GLUE(**SMALL).build(inputs())
    run = trainer(tmp_path, max_epochs=1)
    run.fit(model, datamodule=Batches(1))
    path = tmp_path / "last.ckpt"
    run.save_checkpoint(path)
    torch.load(path, weights_only=True)
    loaded = GLUE.load_from_checkpoint(path, weights_only=True)
    assert loaded.inputs.difference(model.inputs) is None
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    for name, value in model.named_buffers():
        assert torch.equal(dict(loaded.named_buffers())[name], value), name
    found = trainer(tmp_path).predict(loaded.eval(), datamodule=Batches(1))[0]
    model.eval()
    for modality, fields in batch().items():
        assert torch.equal(found[modality]["index"], torch.arange(8))
        torch.testing.assert_close(found[modality]["embedding"], model.encode(modality, fields)[0])
    resumed = trainer(tmp_path, max_epochs=2)
    resumed.fit(GLUE(**SMALL).build(inputs()), datamodule=Batches(1), ckpt_path=path, weights_only=True)
    assert resumed.current_epoch == 2


def test_checkpoint_of_other_data_is_refused():
    model = GLUE(**SMALL).build(inputs())
    checkpoint = {"state_dict": {}}
    with pytest.raises(ModelError, match=r"no 'model_inputs', only \['state_dict'\]"):
        model.on_load_checkpoint(checkpoint)
    model.on_save_checkpoint(checkpoint)
    model.on_load_checkpoint(checkpoint)
    checkpoint["model_inputs"]["graph"]["weight"][3] += 0.5
    with pytest.raises(ModelError, match=r"'graph\.weight' differs"):
        model.on_load_checkpoint(checkpoint)
    checkpoint["model_inputs"]["modalities"].pop("rna")
    with pytest.raises(ModelError, match=r"'modalities\.its entries' differs"):
        model.on_load_checkpoint(checkpoint)


def test_encoder_is_its_equation():
    model = GLUE(**SMALL).build(inputs()).double().eval()
    fields, encoder = to_double(batch())["hic"], model.encoders["hic"]
    for norm in encoder.norms:
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    h = (1 + fields["x"] * 5e4 / fields["library"]).log()
    for layer, norm in zip((encoder.first, encoder.hidden[0]), encoder.norms, strict=True):
        h = h @ layer.weight.T + layer.bias
        h = torch.where(h > 0, h, 0.2 * h)
        h = (h - norm.running_mean) / (norm.running_var + norm.eps).sqrt() * norm.weight + norm.bias
    loc, std = model.encode("hic", fields)
    torch.testing.assert_close(loc, h @ encoder.loc.weight.T + encoder.loc.bias)
    deviation = (1 + (h @ encoder.std.weight.T + encoder.std.bias).exp()).log() + 1e-7
    torch.testing.assert_close(std, deviation)


def test_imputed_contacts_are_expected_contacts():
    model = GLUE(**SMALL).build(inputs()).eval()
    imputed, mean, dropout = (model.impute("hic", batch()["hic"], output=o) for o in ("expected", "mean", "dropout"))
    assert imputed.shape == (8, N_HIC)
    torch.testing.assert_close(mean.sum(1, keepdim=True), batch()["hic"]["library"])
    torch.testing.assert_close(imputed, model.impute("hic", batch()["hic"]))
    torch.testing.assert_close(imputed, (1 - dropout) * mean)
    assert model.impute("rna", batch()["rna"]).shape == (8, N_GENES)


def test_propagation_is_the_normalised_adjacency():
    graph = inputs().graph
    encoder = GraphEncoder(
        graph.n_vertices,
        4,
        source=torch.tensor(graph.source),
        target=torch.tensor(graph.target),
        weight=torch.tensor(graph.weight),
        sign=torch.where(torch.arange(len(graph.source)) % 3 == 0, -1.0, 1.0),
    ).double()
    adjacency = torch.zeros(graph.n_vertices, graph.n_vertices, dtype=torch.float64)
    signs = torch.zeros_like(adjacency)
    for s, t, w, sign in zip(graph.source, graph.target, encoder.weight, encoder.sign, strict=False):
        adjacency[s, t] = adjacency[t, s] = w
        signs[s, t] = signs[t, s] = sign
    degree = adjacency.sum(1)
    h = (signs * adjacency / (degree[:, None] * degree).sqrt()) @ encoder.embedding
    loc, std = encoder()
    torch.testing.assert_close(loc, encoder.loc(h), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(std, torch.nn.functional.softplus(encoder.std(h)) + 1e-7)
    (found,) = torch.autograd.grad(loc.sin().sum(), encoder.embedding)
    (expected,) = torch.autograd.grad(encoder.loc(h).sin().sum(), encoder.embedding)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_cells_without_counts_add_nothing_and_stay_finite():
    model = GLUE(**SMALL).build(inputs()).eval()
    empty = batch(2)["hic"]
    empty["x"], empty["library"] = torch.zeros_like(empty["x"]), torch.zeros(2, 1)
    u, _ = model.encode("hic", empty)
    nll = model.nll("hic", empty, u=u, v=model.vertices()[0])
    assert nll.abs() < 1e-6


def test_refusals(tmp_path):
    with pytest.raises(ModelError, match=r"stage='warmup'\): choose one of \('finetune', 'pretrain'\)"):
        GLUE(stage="warmup")
    with pytest.raises(ModelError, match=r"key='dense'\): choose one of"):
        GLUE(key="dense")
    with pytest.raises(ModelError, match=r"hidden_depth=0\): an encoder needs at least one hidden layer"):
        GLUE(hidden_depth=0)
    with pytest.raises(ModelError, match=r"names \['atac'\], but the data have \['hic', 'rna'\]"):
        GLUE(**SMALL, modality_weights={"atac": 1.0}).build(inputs())
    with pytest.raises(ModelError, match="without a data module"):
        trainer(tmp_path, max_steps=1).fit(GLUE(**SMALL), DataLoader([batch()], batch_size=None))
    again = trainer(tmp_path, max_steps=1)
    again.fit(GLUE(**SMALL).build(inputs()), datamodule=Batches())
    with pytest.raises(ModelError, match="without a data module"):
        # Lightning leaves the data module of the fit before in `trainer.datamodule`
        again.fit(GLUE(**SMALL), DataLoader([batch()], batch_size=None))
    with pytest.raises(ModelError, match=r"Batches has no \['tables', 'layout', 'graph', 'vertices'\]"):
        trainer(tmp_path, max_steps=1).fit(GLUE(**SMALL), datamodule=Batches())
    with pytest.raises(ModelError, match="GLUE has no networks yet; call build"):
        GLUE(**SMALL).latents(batch())
    built = GLUE(**SMALL).build(inputs(("rna",)))
    with pytest.raises(ModelError, match="its networks exist already"):
        built.build(inputs())
    with pytest.raises(ModelError, match=r"cells of 'hic', but was built for \['rna'\]"):
        built.latents(batch())


def test_refused_inputs():
    whole = inputs()
    with pytest.raises(ModelError, match=r"modalities \['protein'\]; it has decoders for \['hic', 'rna'"):
        ModelInputs(modalities={"protein": whole.modalities["rna"]}, strata=None, graph=whole.graph)
    with pytest.raises(ModelError, match="'hic' and its strata must be given together"):
        ModelInputs(modalities=whole.modalities, strata=None, graph=whole.graph)
    with pytest.raises(ModelError, match=r"has 0 edges with weights from None"):
        GraphEncoder(
            2,
            2,
            source=torch.empty(0, dtype=torch.int64),
            target=torch.empty(0, dtype=torch.int64),
            weight=torch.empty(0),
            sign=torch.empty(0),
        )
