"""Technique `offload`: tensors that autograd keeps between forward and backward pass wait in host memory."""
