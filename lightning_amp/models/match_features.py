"""Put the features and batches of data in the order of a model that was built for other data, or refuse the data.

Features are compared by name. Genes in another order are put in order; a missing gene, and any difference of bins,
strata or resolution, is an error.
"""

import warnings
from dataclasses import asdict, replace

from lightning_amp.data.loading.datamodule import SingleCellDataModule
from lightning_amp.data.loading.dataset import CellTable
from lightning_amp.errors import ModelError
from lightning_amp.models.inputs import HIC, ModalityInputs, ModelInputs, difference, strata_from

SHOWN = 3
REMEDY = (
    "write the data with the model's features: `lightning-amp prepare --like OLD ...`, where OLD is the data directory"
    " that the model was trained on"
)


def match_features(data: object, inputs: ModelInputs, *, predicts: bool) -> None:
    """Put the tables of a data module in the order of a model's inputs, after the data module's `setup`.

    Modalities of which the model's checkpoint has no names are compared by their sizes.

    Args:
        data: The data module; the columns and the codes of batches of its tables change. Other data modules than
            `SingleCellDataModule` have no names of features, and are left alone.
        inputs: What the model was built for.
        predicts: Whether only predictions are made: batches that the model has not seen are then a warning.

    Raises:
        ModelError: A modality, feature or bin is missing, or a batch where `predicts` is false.
    """
    if not isinstance(data, SingleCellDataModule):
        return
    strangers = [name for name in data.tables if name not in inputs.modalities]
    if strangers:
        raise ModelError(
            f"{data.data_dir}: the model was built for {list(inputs.modalities)!r}, and the data have {strangers!r};"
            f" leave these out, modalities={sorted(set(data.tables) - set(strangers))!r}"
        )
    for name, table in data.tables.items():
        built = inputs.modalities[name]
        if name == HIC:
            _check_strata(data, inputs)
        elif built.features is not None:
            _order(table, built.features)
        elif table.n_features != built.n_features:
            raise ModelError(
                f"{table.path}: the model was built for {built.n_features!r} features of {name!r}, found"
                f" {table.n_features!r}; {REMEDY}"
            )
        if built.batches is not None:
            _code_batches(table, built, predicts=predicts)


def _order(table: CellTable, names: list[str]) -> None:
    """Keep the columns of these names, in their order."""
    own = table.feature_names()
    if own == names:
        return
    columns = {name: column for column, name in enumerate(own)}
    if missing := [name for name in names if name not in columns]:
        raise ModelError(
            f"{table.path}: {len(missing):,} of the model's {len(names):,} features of {table.modality!r} are missing,"
            f" e.g. {missing[:SHOWN]!r}; {REMEDY}"
        )
    if table.columns is not None:
        raise ModelError(
            f"{table.path}: the features of {table.modality!r} are not in the model's order, and each rank reads its"
            f" own columns; {REMEDY}"
        )
    table.take([columns[name] for name in names])


def _check_strata(data: SingleCellDataModule, inputs: ModelInputs) -> None:
    """Refuse other bins, strata or resolutions than the model's."""
    assert data.layout is not None, "a data module with Hi-C cells has their layout"
    path, names, own = data.tables[HIC].path, inputs.modalities[HIC].features, data.layout.anchor_names.tolist()
    if names is not None and own != names:
        absent = sorted(set(names) - set(own))
        what = f"{len(absent):,} are missing, e.g. {absent[:SHOWN]!r}" if absent else "their order or number differs"
        raise ModelError(
            f"{path}: the model was built for {len(names):,} bins such as {names[0]!r}, found {len(own):,} such as"
            f" {own[0]!r}; {what}: {REMEDY}"
        )
    assert inputs.strata is not None, "ModelInputs checks that Hi-C comes with strata"
    found = strata_from(data.layout)
    if (where := difference(asdict(found), asdict(replace(inputs.strata, shares=None)))) is not None:
        raise ModelError(
            f"{path}: the model was built for strata at the distances {inputs.strata.distances!r}, found"
            f" {found.distances!r} ({where!r} differs); {REMEDY}"
        )


def _code_batches(table: CellTable, built: ModalityInputs, *, predicts: bool) -> None:
    """Number the experimental batches as the model does."""
    assert built.batches is not None, "a modality without names is not compared"
    unseen = [name for name in table.batch_names.tolist() if name not in built.batches]
    if unseen and not predicts:
        raise ModelError(
            f"{table.path}: the model has no batch {unseen[:SHOWN]!r} of {table.modality!r}, only"
            f" {built.batches[:SHOWN]!r}; train a new model, or predict, which needs no batch for an embedding"
        )
    if unseen:
        warnings.warn(
            f"{table.path}: the model has not seen the batches {unseen[:SHOWN]!r} of {table.modality!r}. Embeddings do"
            f" not depend on the batch; expected values of these cells are those of batch {built.batches[0]!r}",
            stacklevel=2,
        )
    table.code_batches(built.batches)
