"""Techniques for blocks of any module, which keep their class, their names and their parameters."""
