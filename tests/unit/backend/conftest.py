"""Loads the CPU engine's kernels; without that engine its tests are not collected."""

import torch
from vllm.platforms import current_platform

of_cpu_engine = ["test_copies_simulation.py", "test_cpu.py", "test_layout.py"]
collect_ignore = [] if current_platform.is_cpu() else of_cpu_engine

if current_platform.is_cpu():
    current_platform.import_kernels()
    # The engine's first matrix product asks the kernel of the OS for AMX; here nothing else does.
    torch.cpu._init_amx()
