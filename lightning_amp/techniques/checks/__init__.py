"""Whether a part of somebody's module computes what a technique would compute in its place."""
