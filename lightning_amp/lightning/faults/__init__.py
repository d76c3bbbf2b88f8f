"""What happens when a rank fails: the others learn which one and why, and end within seconds."""
