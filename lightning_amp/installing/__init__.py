"""Install the rules of a plan in a module, and read what planning needs from a module."""
