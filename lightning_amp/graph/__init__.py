"""Capture blocks of any module as operator graphs, and determine memory use and dims of their operators."""
