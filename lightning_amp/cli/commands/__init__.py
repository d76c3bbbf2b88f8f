"""One file for each command of `lightning-amp`."""
