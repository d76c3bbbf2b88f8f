"""Format plans and answers as text of 80 columns."""
