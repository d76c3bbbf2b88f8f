"""Small modules with something odd, by kind: every technique trains them exactly, or refuses them with a reason."""
