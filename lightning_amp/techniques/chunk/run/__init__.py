"""Generate and run the chunked forward of a captured block, forward and backward."""
