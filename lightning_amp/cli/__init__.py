"""The command line: one file per verb, and main.py, which finds the verb and turns mistakes into one message."""
