"""Choose strategies by policy "auto" or "paper", and build a plan's rules from them."""
