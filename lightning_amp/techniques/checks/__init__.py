"""Whether a part of a user's module computes what a technique would compute in its place."""
