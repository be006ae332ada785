"""Relay fusion: the op, and its kernels per device."""
