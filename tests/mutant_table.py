"""The edits of tests/mutants.py. Kinds: a collective that is missing or doubled, a scale, a shard, a normaliser that
is wrong, or what stands for them in a technique without collectives."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """One edit: the line `old` of a file becomes `new`, and the tests must fail."""

    technique: str
    kind: str
    file: str
    old: str
    new: str
    tests: str


P, M = "lightning_amp/parallel", "lightning_amp/models"
S2 = "tests/test_feature_parallel.py tests/test_row_parallel.py"
S3 = "tests/test_chunked_attention.py tests/test_local_attention.py"
S4 = "tests/test_key_first.py"
S5 = "tests/test_hidden_parallel.py"

MUTANTS = [
    Mutant(
        "S2",
        "missing: loss of own features",
        f"{P}/region.py",
        "return collectives.leave(self.mesh, total) if self.features else total",
        "return total",
        S2,
    ),
    Mutant(
        "S2",
        "doubled: sum of a wide layer",
        f"{P}/row_parallel.py",
        "y = collectives.leave(self.mesh, F.linear(own, self.weight))",
        "y = collectives.leave(self.mesh, collectives.leave(self.mesh, F.linear(own, self.weight)))",
        S2,
    ),
    Mutant(
        "S2",
        "scale: bias of every rank added",
        f"{P}/row_parallel.py",
        "y = collectives.leave(self.mesh, F.linear(own, self.weight))",
        "y = collectives.leave(self.mesh, F.linear(own, self.weight, self.bias))",
        S2,
    ),
    Mutant(
        "S2",
        "shard: anchors of other features",
        f"{P}/feature_parallel.py",
        'self.register_buffer("nodes", self.own(nodes).clone(), persistent=False)',
        'self.register_buffer("nodes", self.own(nodes.flip(0)).clone(), persistent=False)',
        S2,
    ),
    Mutant(
        "S2",
        "normaliser: of own features only",
        f"{P}/sharded_softmax.py",
        "normaliser = collectives.all_gather(mesh, own).logsumexp(dim=0)",
        "normaliser = own",
        S2,
    ),
    Mutant(
        "S3",
        "missing: last chunk",
        f"{P}/chunked_attention.py",
        "firsts = range(0, n_buckets, self.buckets)",
        "firsts = range(0, max(1, n_buckets - 1), self.buckets)",
        S3,
    ),
    Mutant(
        "S3",
        "doubled: every row twice",
        f"{P}/chunked_attention.py",
        "return torch.cat(rows)[: len(q)]",
        "return torch.cat([row for row in rows for _ in (0, 1)])[: len(q)]",
        S3,
    ),
    Mutant(
        "S3",
        "shard: neighbours of bucket 0",
        f"{M}/local_attention.py",
        "self._mask(scores, first=first, n_buckets=len(queries) // w)",
        "self._mask(scores, first=0, n_buckets=len(queries) // w)",
        S3,
    ),
    Mutant(
        "S3",
        "gradient: chunks cut off",
        f"{P}/chunked_attention.py",
        "rows = checkpoint(attend, state, first, last, use_reentrant=False, preserve_rng_state=False)",
        "rows = attend(tuple(t.detach() for t in state), first, last)",
        S3,
    ),
    Mutant(
        "S3",
        "memory: nothing recomputed",
        f"{P}/chunked_attention.py",
        "        if self.retain:\n",
        "        if True:\n",
        S3,
    ),
    Mutant(
        "S4",
        "shard: anchors shifted by one",
        f"{P}/key_first.py",
        "key.narrow(0, start, len(nodes))",
        "key.narrow(0, max(0, start - 1), len(nodes))",
        S4,
    ),
    Mutant(
        "S4",
        "shard: any nodes taken as a run",
        f"{P}/key_first.py",
        "return start if torch.equal(nodes, run) else None",
        "return start if len(nodes) == len(run) else None",
        S4,
    ),
    Mutant(
        "S4",
        "shard: nodes of an earlier call",
        f"{P}/key_first.py",
        "if nodes is not self._seen or version != self._version:",
        "if self._seen is None:",
        S4,
    ),
    Mutant(
        "S4",
        "gradient: keys cut off",
        f"{P}/key_first.py",
        "return F.embedding(nodes, key)",
        "return F.embedding(nodes, key.detach())",
        S4,
    ),
    Mutant(
        "S4",
        "memory: all anchors decoded",
        f"{P}/key_first.py",
        "return u @ _select(key, nodes, self._start).T",
        "return (u @ key.T)[:, nodes]",
        S4,
    ),
    Mutant(
        "S5",
        "missing: sum of decoded scores",
        f"{P}/hidden_decode.py",
        "return collectives.leave(self.mesh, self.inner(u, key, nodes))",
        "scores: Tensor = self.inner(u, key, nodes)\n        return scores",
        S5,
    ),
    Mutant(
        "S5",
        "doubled: sum of decoded scores",
        f"{P}/hidden_decode.py",
        "return collectives.leave(self.mesh, self.inner(u, key, nodes))",
        "return collectives.leave(self.mesh, collectives.leave(self.mesh, self.inner(u, key, nodes)))",
        S5,
    ),
    Mutant(
        "S5",
        "scale: root of own channels",
        f"{M}/local_attention.py",
        "F.pad(q * self.dim**-0.5, fill)",
        "F.pad(q * q.shape[-1] ** -0.5, fill)",
        S5,
    ),
    Mutant(
        "S5",
        "shard: rotary of other channels",
        f"{M}/local_attention.py",
        "(1.0 / ROTARY_BASE**exponent)[self._pairs]",
        "(1.0 / ROTARY_BASE**exponent)[: self._pairs.stop - self._pairs.start]",
        S5,
    ),
    Mutant(
        "S5",
        "normaliser: norm of own channels",
        f"{M}/local_attention.py",
        "squared = self._total(k.square().sum(dim=-1, keepdim=True))",
        "squared = k.square().sum(dim=-1, keepdim=True)",
        S5,
    ),
]
