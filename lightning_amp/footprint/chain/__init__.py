"""A step as a chain of blocks: what each would keep and take, in time and bytes, whatever is computed again or cut."""
