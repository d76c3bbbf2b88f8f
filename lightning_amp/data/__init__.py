"""Data files on disk: reading, checking, preparing and synthesising them."""
