"""Modules with which something once went wrong, each with every technique that met it."""
