"""Detect decoders written elsewhere by their structure, and compute them by ours with the same parameter objects."""
