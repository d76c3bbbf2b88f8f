"""Average gradients and share batch statistics over the data axis (S1)."""
