"""Making a data directory, from files of a person's own or from random numbers."""
