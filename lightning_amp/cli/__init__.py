"""Command line: one file per command in commands/; main.py runs the command and reports mistakes as one message."""
