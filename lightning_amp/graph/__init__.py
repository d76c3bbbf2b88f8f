"""Capture blocks of any module, and analyse what their operators do to memory and to dimensions."""
