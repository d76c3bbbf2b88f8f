"""Compute one call on sharded tensors: by its handler, by rule, or by the operators it consists of."""
