"""Provenance of a measurement: date, device, versions."""

import os
import platform
from datetime import datetime
from importlib import metadata

from vllm_relay.sharing.cost_store import cpu_name


def version(distribution: str) -> str:
    """Version of a distribution, or "not installed"."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def device() -> str:
    """Name of the GPU if torch sees one, else of the CPU."""
    if "+cpu" not in version("torch"):
        import torch  # takes seconds; CPU builds have no GPU to report

        if torch.cuda.is_available():
            return torch.cuda.get_device_name()
    return cpu_name()


def provenance() -> dict[str, str]:
    """CSV columns that say where, when and with which versions a number was measured."""
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "device": device(),
        "cores": str(len(os.sched_getaffinity(0))),
        "vllm": version("vllm"),
        "torch": version("torch"),
        "vllm_relay": version("vllm-relay"),
        "python": platform.python_version(),
    }
