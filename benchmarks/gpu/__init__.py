"""The parts of ``benchmarks/gpu_check.py``. They need, beside the standard library:

- all: torch, NumPy, vLLM 0.26 or later with FlashAttention 3, Triton, this repository;
- ``parity``: transformers (the float32 reference), safetensors, ``tests/engine/in_worker.py``;
- ``op``, system "flashinfer": FlashInfer, and a compiler where it has no kernels for the device.
"""
