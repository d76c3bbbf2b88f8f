"""Check that a part of a user's module computes what its replacement by a technique would."""
