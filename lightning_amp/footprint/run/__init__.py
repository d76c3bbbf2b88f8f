"""The fit around a counted step: its settings, hooks that run, what it holds later, gradients of the step before."""
