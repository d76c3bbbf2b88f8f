"""The edits of tests/mutants.py. Kinds: a collective that is missing or doubled, a scale, a shard, a normaliser that
is wrong, or what stands for them in a technique without collectives."""

from tests.mutant_table.attention import ATTENTION
from tests.mutant_table.blocks import BLOCKS
from tests.mutant_table.chunks import CHUNKS
from tests.mutant_table.data_axis import BESIDE_DECODER, DATA_AXIS
from tests.mutant_table.fsdp_groups import FSDP_GROUPS
from tests.mutant_table.graphs import GRAPHS
from tests.mutant_table.pipelines import PIPELINES
from tests.mutant_table.ranks import RANKS
from tests.mutant_table.rescues import RESCUES
from tests.mutant_table.row import Mutant as Mutant
from tests.mutant_table.strata import STRATA

MUTANTS = [
    *(*ATTENTION, *STRATA, *RANKS, *FSDP_GROUPS, *BLOCKS, *RESCUES),
    *(*BESIDE_DECODER, *DATA_AXIS),
    *(*GRAPHS, *CHUNKS, *PIPELINES),
]
