"""Name what in a module may make ranks differ, by what the training runs have shown: nothing here is a proof.

suspect             what was seen
random draws        the single process draws random numbers of which one axis is the cells
batch statistics    BatchNorm that is not shared, or another module whose outputs differ though its inputs agree
buffers             ranks have changed buffers from their own cells
sum over samples    all gradients of one process are those of the ranks times the number of data ranks
unequal parts       outputs agree and losses do not; modalities have parts of different sizes
mean of means       outputs agree and losses do not
rounding            double precision agrees, single precision does not
not finite          a loss or a gradient is not a number
unknown             nothing of this
"""

from collections.abc import Iterator, Sequence

from lightning_amp.lightning.consistency.same_parameters import SHARE_STATISTIC
from lightning_amp.verification.compare import Report
from lightning_amp.verification.result import Row, Suspect

SAME = 1e-6
THE_LOSS = "the loss in training_step"
DRAWS = Suspect(
    suspect="random draws",
    why="Random numbers are drawn for samples. Each rank draws for its part of the batch, so that a sample gets other"
    " numbers than in one process.",
    advice="Training is as random as before, only not the same. For equal runs make the draws a function of the sample:"
    " lightning_amp.models.keyed_noise has KeyedDropout and keyed_normal; or switch them off while you compare.",
)
NORMS = Suspect(
    suspect="batch statistics",
    why="With share_batch_statistics=False BatchNorm normalises by the samples of one rank.",
    advice="Share the statistics: AMPStrategy(share_batch_statistics=True), which is the default.",
)
READERS = Suspect(
    suspect="batch statistics",
    why="Outputs differ for a sample whose inputs agree: such a module may read other samples of the batch, of which a"
    " rank has its part only.",
    advice="Compute what it reads over the samples of all ranks (self.all_gather with sync_grads=True), use"
    " nn.BatchNorm, which the strategy shares, or split the model instead, where it has a decomposed decoder:"
    " model_parallel_size=devices.",
)
BUFFERS = Suspect(
    suspect="buffers",
    why="These buffers differ between ranks after training: the module changes them from the samples of its rank, and"
    " what reads them differs too.",
    advice=f"{SHARE_STATISTIC}. Otherwise rank 0's are taken at every validation, and are in checkpoints.",
)
SUM = Suspect(
    suspect="sum over samples",
    where=THE_LOSS,
    why="The gradients of one process are those of the ranks times the number of data ranks: the loss may be a sum over"
    " samples, and ranks average.",
    advice="Take the mean over samples (and a larger learning rate), then verify again.",
)
UNEQUAL = Suspect(
    suspect="unequal parts",
    where=THE_LOSS,
    why="Every module agrees and the loss does not. Modalities have different numbers of samples, and ranks unequal"
    " parts of them: a rank's loss is weighted by all of its samples, which is right for one mean over samples only.",
    advice="Give every rank equally many samples of every modality: drop_last=True, or SingleCellDataModule.",
)
MEANS = Suspect(
    suspect="mean of means",
    where=THE_LOSS,
    why="Every module agrees and the loss or its gradient does not. The loss may divide by something that differs"
    " between ranks, such as the number of entries of a mask, or relate samples to each other.",
    advice="Divide by the number of samples, or by a constant; or divide by the mean of the denominator over ranks:"
    " self.trainer.strategy.reduce(denominator.detach(), reduce_op='mean').",
)
ROUNDING = Suspect(
    suspect="rounding",
    why="Single precision differs, and in double precision both agree: sums in another order round in another way.",
    advice="Nothing is wrong with the ranks; if one process with the samples in another order differs as much, the step"
    " itself loses digits.",
)
ROUNDING_TOO = Suspect(
    suspect="rounding",
    why="Single precision alone was compared, in which sums in another order round in another way.",
    advice="Compare in double precision too.",
)
NOT_FINITE = Suspect(
    suspect="not finite",
    why="A number that is not finite cannot be compared.",
    advice="Let one process train first: Trainer(detect_anomaly=True) says where it begins.",
)
UNKNOWN = Suspect(
    suspect="unknown",
    why="No random draw, no module of which the outputs alone differ, no loss that averages in another way was seen.",
    advice="Look for what depends on the rank (global_rank, files), in training_step, the optimisers and the hooks, or"
    " on the order of samples; where nothing is found, this may be a fault of lightning_amp: please report it with this"
    " table.",
)


def find_suspects(rows: Sequence[Row], reports: Sequence[Report]) -> tuple[Suspect, ...]:
    """Suspects for the rows that are wrong; `reports` are those of all ranks in all precisions."""
    wrong = [row for row in rows if row.wrong]
    if not wrong:
        return ()
    for row in wrong:
        if row.error != row.error:
            return (NOT_FINITE.at([f"{row.quantity}, {row.precision}"]),)
    exact = [row for row in wrong if row.precision == "float64"]
    if exact:
        return tuple(_seen(exact, reports)) or (UNKNOWN,)
    if any(report.precision == "float64" for report in reports):
        return (ROUNDING.at([f"{wrong[0].quantity}, {wrong[0].worst}"]),)
    return (*_seen(wrong, reports), ROUNDING_TOO)


def _seen(wrong: Sequence[Row], reports: Sequence[Report]) -> Iterator[Suspect]:
    of = [report for report in reports if report.precision == wrong[0].precision]
    first, ranks = of[0], of[0].place[1]
    kinds = {row.quantity for row in wrong}
    if first.draws and any(not quantity.startswith("buffers") for quantity in kinds):
        yield DRAWS.at(list(first.draws))
    if first.unshared:
        yield NORMS.at(first.unshared)
    explained = [*first.unshared, *filter(None, first.draws.values())]
    explained += [buffer.rpartition(".")[0] for buffer in first.apart]
    origins = dict.fromkeys(name for report in of for name in report.origins)
    readers = [name for name in origins if not any(f"{other}.".startswith(f"{name}.") for other in explained)]
    if readers and ranks > 1:
        yield READERS.at(readers)
    others = next((row.wrong for row in wrong if len(wrong) == 1 and row.quantity.startswith("buffers")), [])
    if first.apart or others:
        yield BUFFERS.at(first.apart or others)
    # a buffer of the rank's own cells, read one step later, explains what goes wrong after the first step
    begins = "loss, step 1" in kinds or "gradients, step 1" in kinds
    losses = any(quantity.startswith(("loss", "gradients")) for quantity in kinds)
    if "forward, step 1" in kinds or ranks == 1 or not losses or (first.apart and not begins):
        return
    if first.factor is not None and abs(first.factor / ranks - 1) < SAME:
        yield SUM
    else:
        yield UNEQUAL if first.uneven else MEANS
