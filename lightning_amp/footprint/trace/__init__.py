"""A counted step as a trace of its storages, the bytes that CUDA's allocator reserves for it, and files of it."""
