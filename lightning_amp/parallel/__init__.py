"""Plan + module -> installed modules; one technique per file, one registry."""
