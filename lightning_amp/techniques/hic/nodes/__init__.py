"""Shard anchors and graph vertices over ranks, with a halo exchange (nodes)."""
