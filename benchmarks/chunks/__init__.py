"""Chunks of any module, in inference and in training: bytes, seconds, and what is promised of both."""
