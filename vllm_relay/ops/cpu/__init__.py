"""Providers for CPU tensors, one op per file."""
