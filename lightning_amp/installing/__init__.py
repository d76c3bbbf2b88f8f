"""Install the rules of a plan in a module, and describe a module for planning."""
