"""Loads the CPU engine's kernels; without that engine its tests are not collected."""

import torch
from vllm.platforms import current_platform

collect_ignore = [] if current_platform.is_cpu() else ["test_cpu.py", "test_layout.py"]

if current_platform.is_cpu():
    current_platform.import_kernels()
    # The engine's first matrix product asks the kernel of the OS for AMX; here nothing else does.
    torch.cpu._init_amx()
