"""What planning and techniques share: the profiled step, draft plans, the chain of blocks, rates and links."""
