"""Cost model: operators and collectives -> seconds."""
