"""Define data that planning and techniques share: the profiled step, draft plans, device rates and links."""
