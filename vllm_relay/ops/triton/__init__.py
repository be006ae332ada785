"""Triton kernels, one per file: jit kernel, launcher, public function."""
