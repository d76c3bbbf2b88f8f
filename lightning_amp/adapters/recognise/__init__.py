"""Whether a foreign decoder computes what ours would: small copies, the real size, settings, hooks."""
