"""Mutants of what runs again outside of a Hi-C decoder, and of what ranks of the data axis share."""

from tests.mutant_table.row import L, Mutant, P

BESIDE = "tests/parallel/blocks/test_beside_decoder.py"
WITHIN = f"{L}/first_look/within_budget.py"
BUDGET = "tests/lightning/first_look/test_within_budget.py"
NORM = f"{P}/s1_data/batch_norm.py"
NORMS = "tests/parallel/s1_data/test_batch_norm.py"
SYNC = "tests/parallel/s1_data/test_gradient_sync.py"

BESIDE_DECODER = [
    Mutant(
        "beside a decoder",
        "the decoder's parts in chunks of blocks",
        f"{L}/first_look/outside_decoder.py",
        "return [INSIDE if overlap(block.fqn, decoder) else table for block, table in pairs]",
        "return [table for block, table in pairs]",
        BESIDE,
    ),
    Mutant(
        "beside a decoder",
        "more blocks outside than the budget asks for",
        WITHIN,
        "names = (choose(chain, bound) or leanest(chain, at_least=bound)).recomputed",
        "names = leanest(chain).recomputed",
        BUDGET,
    ),
    Mutant(
        "beside a decoder",
        "blocks outside run again where the step fits",
        WITHIN,
        "    if made.whole.predicted_peak_bytes + more <= budget:\n        return made.whole\n",
        "",
        BUDGET,
    ),
    Mutant(
        "beside a decoder",
        "a budget compared with what a chain counts of the decoder's functions",
        WITHIN,
        "    limit += peak_bytes(chain, ()) - (made.alone.predicted_peak_bytes + more)\n",
        "    limit -= 50_000\n",
        BUDGET,
    ),
    Mutant(
        "beside a decoder",
        "rows dealt to ranks before the plan",
        f"{L}/first_look/cells_per_step.py",
        "if not drew and not any(map(_is_dealt, _each(loaders))):",
        "if not drew:",
        BUDGET,
    ),
    Mutant(
        "beside a decoder",
        "blocks that run again choose for the strata",
        "lightning_amp/planning/plan/strategies.py",
        'if strategy != "recompute" or not blocks_alone]',
        "]",
        BESIDE,
    ),
    Mutant(
        "beside a decoder",
        "what lies outside is not counted",
        f"{L}/first_look/outside_decoder.py",
        "predicted_peak_bytes=plan.predicted_peak_bytes + more,",
        "predicted_peak_bytes=plan.predicted_peak_bytes,",
        BESIDE,
    ),
    Mutant(
        "beside a decoder",
        "a stratum as a block",
        f"{P}/install.py",
        "        if overlaps and ",
        "        if False and ",
        BESIDE,
    ),
]

DATA_AXIS = [
    Mutant(
        "S1",
        "statistics: what is taken off dx is of the rank's own values",
        NORM,
        "tilts, totals = sums.chunk(2)",
        "tilts, totals = tilt, total",
        NORMS,
    ),
    Mutant(
        "S1",
        "statistics: parameters get the gradient of all ranks, which is averaged again",
        NORM,
        "d_weight, d_bias = tilt.to(weight.dtype), total.to(weight.dtype)",
        "d_weight, d_bias = tilts.to(weight.dtype), totals.to(weight.dtype)",
        NORMS,
    ),
    Mutant(
        "S1",
        "statistics: a scale left out of dx",
        NORM,
        "per_value = (rstd if factor is None else rstd * factor) / count",
        "per_value = rstd / count",
        NORMS,
    ),
    Mutant(
        "S1",
        "gradients: means that are not put in place",
        f"{P}/s1_data/gradient_sync.py",
        "copy_each(bucket, unflatten_like(flat, bucket))",
        "unflatten_like(flat, bucket)",
        SYNC,
    ),
]
