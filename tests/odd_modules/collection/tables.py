"""All rows of the collection, by kind."""

from tests.odd_modules.collection.forwards import FORWARDS
from tests.odd_modules.collection.holding import HOLDING
from tests.odd_modules.collection.hooks import HOOKS
from tests.odd_modules.collection.losses import LOSSES
from tests.odd_modules.collection.networks import NETWORKS
from tests.odd_modules.collection.no_stages import NO_STAGES
from tests.odd_modules.collection.outputs import OUTPUTS
from tests.odd_modules.collection.random_numbers import RANDOM_NUMBERS
from tests.odd_modules.collection.row import Row
from tests.odd_modules.collection.stages import STAGES
from tests.odd_modules.collection.state import STATE
from tests.odd_modules.collection.weights import WEIGHTS

TABLES: dict[str, dict[str, Row]] = {
    "state": STATE,
    "random numbers": RANDOM_NUMBERS,
    "weights": WEIGHTS,
    "forwards": FORWARDS,
    "hooks": HOOKS,
    "holding": HOLDING,
    "losses": LOSSES,
    "outputs": OUTPUTS,
    "networks": NETWORKS,
    "stages": STAGES,
    "no stages": NO_STAGES,
}
ROWS: dict[str, Row] = {name: row for table in TABLES.values() for name, row in table.items()}
assert len(ROWS) == sum(map(len, TABLES.values())), "a name is one row's"
