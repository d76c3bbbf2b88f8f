"""Report on a trained model: pictures and a table of checks, for `lightning-amp report`."""
