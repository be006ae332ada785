"""Provenance of a measurement: date, device, versions; in a checkout also revision and command."""

import os
import platform
import re
import shlex
import subprocess
import sys
from datetime import datetime
from importlib import metadata
from pathlib import Path


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
    cpuinfo = Path("/proc/cpuinfo")
    names = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return names[1].strip() if names else platform.processor() or platform.machine()


def first_line(*command: str) -> str:
    """First line that a command prints, or "" if it fails or does not exist."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().partition("\n")[0] if done.returncode == 0 else ""


def revision(root: Path, generated: tuple[str, ...] = ()) -> str:
    """Short git revision, with ``-dirty`` if tracked files other than the generated ones changed.

    Copies without history give ``VLLM_RELAY_REVISION`` or "none".
    """
    git = ("git", "-C", str(root))
    found = first_line(*git, "rev-parse", "--short", "HEAD")
    exclude = [f":!{path}" for path in generated]
    changed = found and first_line(*git, "diff", "--name-only", "HEAD", "--", ".", *exclude)
    return (found or os.environ.get("VLLM_RELAY_REVISION", "none")) + ("-dirty" if changed else "")


def provenance(root: Path | None = None, generated: tuple[str, ...] = ()) -> dict[str, str]:
    """CSV columns that say where and when a number was measured.

    Args:
        root: checkout whose revision and command to add. generated: its generated paths.
    """
    columns = {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "device": device(),
        "cores": str(len(os.sched_getaffinity(0))),
        "vllm": version("vllm"),
        "torch": version("torch"),
        "vllm_relay": version("vllm-relay"),
        "python": platform.python_version(),
    }
    if root is not None:
        script = Path(sys.argv[0]).resolve()
        shown = script.relative_to(root) if script.is_relative_to(root) else script.name
        columns["revision"] = revision(root, generated)
        columns["command"] = shlex.join(["python", str(shown), *sys.argv[1:]])
    return columns
