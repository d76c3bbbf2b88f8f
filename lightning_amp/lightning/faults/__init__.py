"""Handle the failure of a rank: the others report which one and why, and end within seconds."""
