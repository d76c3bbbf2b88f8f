"""Plans of any module from the profile of its training step: what it would take under each technique."""
