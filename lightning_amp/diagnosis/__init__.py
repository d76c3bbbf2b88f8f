"""Profile -> Diagnosis: signals with their evidence."""
