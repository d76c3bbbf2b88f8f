"""Activations on the host: bytes of device and host."""
