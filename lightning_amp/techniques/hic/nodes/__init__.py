"""Split anchors and graph vertices over ranks, with a halo (nodes)."""
