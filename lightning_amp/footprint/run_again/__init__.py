"""What code that runs a second time in a step needs: states put back, and checkpoints of the user's own."""
