"""Generate and run the chunked forward of a captured block, and its backward pass."""
