"""Compute a call on sharded tensors: by its handler, by a rule, or by the operators it consists of."""
