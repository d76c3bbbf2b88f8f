"""Captured blocks of any module, and what their operators do to memory and to dimensions."""
