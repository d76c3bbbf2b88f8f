"""Decoders that are sums over strata or units, and their leaf modules, which techniques may replace."""
