"""Mutants of the graph of a block: capture, flow of dims, peak."""

from tests.mutant_table.row import Mutant

GRAPH = "tests/graph/test_capture.py"
FLOW = "tests/graph/test_flow.py"
TABLE = "tests/graph/test_table.py"

GRAPHS = [
    Mutant(
        "capture",
        "missing guard: plain attributes",
        "lightning_amp/graph/guards.py",
        "        tuple(settings_of(block)),",
        "        block.training,",
        GRAPH,
    ),
    Mutant(
        "capture",
        "missing guard: gradients",
        "lightning_amp/graph/guards.py",
        "value.device.type, value.requires_grad",
        "value.device.type",
        GRAPH,
    ),
    Mutant(
        "capture",
        "missing guard: one tensor twice",
        "lightning_amp/graph/guards.py",
        "return tuple(map(ids.index, ids))",
        "return tuple(range(len(ids)))",
        GRAPH,
    ),
    Mutant(
        "capture",
        "missing: the refusal of a Function's own backward",
        "lightning_amp/graph/capture.py",
        'if found["custom"]:',
        "if not found:",
        GRAPH,
    ),
    Mutant(
        "flow",
        "wrong dim: columns of a linear layer follow the input",
        "lightning_amp/graph/flow_rules.py",
        "pairs = [(d, (0, d)) for d in range(last)] + [(last, (1, 0))]",
        "pairs = [(d, (0, d)) for d in range(last + 1)]",
        FLOW,
    ),
    Mutant(
        "flow",
        "wrong dim: attention's rows follow the keys",
        "lightning_amp/graph/flow_rules.py",
        "pairs = [(last - 1, (0, last - 1)), (last, (2, last))]",
        "pairs = [(last - 1, (1, last - 1)), (last, (2, last))]",
        FLOW,
    ),
    Mutant(
        "flow",
        "guessed: one argument is enough",
        "lightning_amp/graph/table.py",
        "all(pair in sources for pair in carried)",
        "any(pair in sources for pair in carried)",
        FLOW,
    ),
    Mutant(
        "peak",
        "missing: what no row holds",
        "lightning_amp/graph/peak.py",
        "hidden += row.hidden_bytes if train else 0",
        "hidden += 0",
        TABLE,
    ),
    Mutant(
        "peak",
        "wrong: a view's last use is forgotten",
        "lightning_amp/graph/peak.py",
        "last[row.storage] = max(last.get(row.storage, i), row.last_use, i)",
        "last[row.storage] = max(last.get(row.storage, i), i)",
        TABLE,
    ),
]
