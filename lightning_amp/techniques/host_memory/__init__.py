"""What techniques share that keep tensors in host memory: copies, and how much memory they may take."""
