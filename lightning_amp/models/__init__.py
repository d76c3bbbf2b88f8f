"""The reference model of the GLUE family: plain single-device modules that know nothing of parallelism."""
