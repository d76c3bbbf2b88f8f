"""Domain parallel: anchors and graph vertices split over ranks, with a halo."""
