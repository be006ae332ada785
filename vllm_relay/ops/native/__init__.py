"""The C++ CPU kernels: library, packed segments."""
