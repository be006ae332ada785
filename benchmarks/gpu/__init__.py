"""The parts of ``benchmarks/gpu_check.py``. Standard library, torch, NumPy and vLLM only: the
machine it runs on may have nothing else.

None of it has run on a GPU yet.
"""
