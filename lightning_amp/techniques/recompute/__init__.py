"""Activation checkpointing of blocks of any module; blocks keep their class, names and parameters."""
