"""The causes in words: what was probed, what became of the errors, what to do."""

from collections.abc import Sequence

from lightning_amp.lightning.consistency.same_parameters import SHARE_STATISTIC
from lightning_amp.verification.experiments import Findings
from lightning_amp.verification.result import Culprit

NAMED = 4


def drawn(sites: Sequence[str], left: Findings, best: Findings) -> Culprit:
    """Random draws for the rank's samples from torch's generator."""
    is_dropout = any("Dropout" in site or "bernoulli" in site for site in sites)
    what = "dropout masks are" if is_dropout else "random numbers are"
    return Culprit(
        cause="random draws",
        where=_some(sites),
        evidence=f"Its {what} drawn by each rank for its own samples, so a sample gets others than in one process: the"
        f" largest error is {left.largest:.0e}, and {best.largest:.0e} when every sample draws the same numbers"
        " wherever it is.",
        advice="Training is as random as before, only not the same. For equal runs make the draws a function of the"
        " sample: lightning_amp.models.keyed_noise has KeyedDropout and keyed_normal; or switch them off while you"
        " compare.",
    )


def normalised(norms: Sequence[str], own: Findings, best: Findings) -> Culprit:
    """BatchNorm over the rank's own samples."""
    return Culprit(
        cause="batch statistics",
        where=_some(norms),
        evidence="BatchNorm sees the samples of one rank only: its output differs though its input agrees. The largest"
        f" error is {own.largest:.0e}, and {best.largest:.0e} with share_batch_statistics=True.",
        advice="Share the statistics: AMPStrategy(share_batch_statistics=True), which is the default.",
    )


def unequal(before: Findings, after: Findings) -> Culprit:
    """A loss that does not weigh every sample alike where ranks have unequally many."""
    return Culprit(
        cause="unequal parts",
        where="training_step",
        evidence=f"The ranks have unequally many samples, and the largest error is {before.largest:.0e}; with equally"
        f" many it is {after.largest:.0e}. A rank's loss is weighted by its samples, which is right for one mean over"
        " samples: this loss has another denominator, such as several modalities with different numbers of samples.",
        advice="Give every rank equally many samples of every modality: drop_last=True, or SingleCellDataModule.",
    )


def own_cells(before: Findings, after: Findings) -> list[Culprit]:
    """What differs because a rank has its own samples only: modules that read the others, buffers, or the loss."""
    apart = before.first.apart
    origins = [name for name in before.origins if not any(other.startswith(f"{name}.") for other in apart)]
    found = [means(origins, before, after)] if origins or not apart else []
    return [*found, buffers(apart, before, after)] if apart else found


def means(origins: Sequence[str], before: Findings, after: Findings) -> Culprit:
    """A quotient of sums over samples, of which ranks can only average the quotients."""
    evidence = f"The largest error is {before.largest:.0e}, and {after.largest:.0e} when ranks have the same samples:"
    if origins:
        return Culprit(
            cause="batch statistics",
            where=_some(origins),
            evidence=f"{evidence} the output of a sample differs though the input agrees, so it reads the other samples"
            " of the batch, of which a rank has its own only.",
            advice="Compute what it reads over the samples of all ranks (self.all_gather with sync_grads=True), use"
            " nn.BatchNorm, which the strategy shares, or split the model instead, where it has a decomposed decoder:"
            " model_parallel_size=devices.",
        )
    return Culprit(
        cause="mean of means",
        where="the loss in training_step",
        evidence=f"{evidence} every module agrees on every sample, and the loss does not. It divides by something that"
        " differs between ranks, such as the number of entries of a mask, or relates samples to each other.",
        advice="Divide by the number of samples, or by a constant; or divide by the mean of the denominator over ranks:"
        " self.trainer.strategy.reduce(denominator.detach(), reduce_op='mean').",
    )


def summed(factor: float) -> Culprit:
    """A sum over samples."""
    return Culprit(
        cause="sum over samples",
        where="the loss in training_step",
        evidence=f"Every gradient of one process is {factor:.6g} times that of the ranks: the loss is a sum over"
        " samples, and ranks average.",
        advice="Take the mean over samples (and a larger learning rate), then verify again.",
    )


def buffers(names: Sequence[str], before: Findings, after: Findings | None = None) -> Culprit:
    """Buffers that the module changes by itself, such as running statistics of the batch."""
    steps = len(before.first.one_losses)
    seen = f"Losses, gradients and parameters of {steps} step{'s' if steps > 1 else ''} agree, these buffers do not"
    if after is not None:
        same = f"{after.largest:.0e} when all ranks have the same samples"
        seen = f"The largest error is {before.largest:.0e}, and {same}"
    return Culprit(
        cause="buffers",
        where=_some(names),
        evidence=f"{seen}: the module changes these buffers from the samples of its rank,"
        " and what reads them differs.",
        advice=f"{SHARE_STATISTIC}. Otherwise rank 0's are taken at every validation, and are in checkpoints.",
    )


def rounding(found: Findings, plain: Findings) -> Culprit:
    """Errors in single precision only."""
    row = next(row for row in found.rows if row.wrong)
    return Culprit(
        cause="rounding",
        where=f"{row.quantity}, {row.worst}" if row.worst else row.quantity,
        evidence=f"In double precision losses and gradients agree to {plain.largest:.0e}, so both compute the same; in"
        f" {row.precision} sums in another order differ by {row.error:.0e}.",
        advice="Nothing is wrong with the ranks; if one process with the samples in another order differs as much, the"
        " step itself loses digits.",
    )


def not_finite(found: Findings) -> Culprit:
    """A loss that is no number."""
    row = next(row for row in found.rows if row.error != row.error)
    return Culprit(
        cause="not finite",
        where=f"{row.quantity}, {row.precision}",
        evidence="The loss is not a number or infinite, which cannot be compared.",
        advice="Let one process train first: Trainer(detect_anomaly=True) says where it begins.",
    )


def unknown(plain: Findings, best: Findings) -> Culprit:
    """Errors that none of the experiments has explained."""
    origins = best.origins
    where = _some(origins) if origins else ""
    place = (
        "These modules differ first, though what they read agrees."
        if origins
        else "No module differs by itself: look at training_step, the optimisers and the hooks."
    )
    if plain.first.elsewhere:
        place += f" training_step draws from {' and '.join(plain.first.elsewhere)}, which cannot be made equal here."
    return Culprit(
        cause="unknown",
        where=where,
        evidence=f"The largest error is {plain.largest:.0e}, and {best.largest:.0e} with equal draws and shared batch"
        f" statistics; the same samples on every rank do not explain it either. {place}",
        advice="Look for what depends on the rank (global_rank, numpy.random, files) or on the order of samples; where"
        " none is found, this may be a fault of lightning_amp: please report it with this table.",
    )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return "; ".join(names[:NAMED]) + more
