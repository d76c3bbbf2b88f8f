"""Check that a foreign decoder computes what ours does: small copies, the real size, settings, hooks."""
