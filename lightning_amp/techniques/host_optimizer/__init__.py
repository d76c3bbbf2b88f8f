"""Keep the optimizer's state in host memory, and update parameters there."""
