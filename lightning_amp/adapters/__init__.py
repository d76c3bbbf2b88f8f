"""Detect Hi-C decoders of other projects by their structure, and run ours instead, with the same parameters."""
