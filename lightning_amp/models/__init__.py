"""The reference model of the GLUE family: plain single-device modules, independent of parallelism."""
