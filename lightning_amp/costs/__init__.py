"""Data and searches that planning and techniques share: profiled step, draft plans, sizes, rates, forms of blocks."""
