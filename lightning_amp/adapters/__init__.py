"""Decoders written elsewhere, recognised by their structure and computed by ours with the same parameter objects."""
