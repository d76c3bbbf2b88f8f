"""What replay of operators makes of modules whose parts are attributes, functions and lists."""
