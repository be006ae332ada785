"""The memory that relay takes on a CPU: a bound that fits beside vLLM's KV cache."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_memory_node_info

_MOST_PACKED = 2 << 30
# Partials that live at once: of the step that runs, and of the last one.
_STEPS = 2
_CGROUPS, _OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


@dataclass(frozen=True)
class MemoryBound:
    """Bytes of one worker and KV cache group.

    Attributes:
        packed: of all packed segments. partials: of the partials of one step.
    """

    packed: int
    partials: int

    @property
    def total(self) -> int:
        return self.packed + _STEPS * self.partials


def memory_bound(
    vllm_config: Any,
    kv_bytes_per_block: int,
    bytes_per_token: int,
    max_copy_gib: float | None,
    share: float = 1.0,
) -> MemoryBound:
    """At most half of the memory, or of the cgroup's, that the KV caches of this machine leave.

    Args:
        kv_bytes_per_block: of the KV cache that is yet to be touched, all layers.
        bytes_per_token: of the partials of one token in a step of the most levels.
        max_copy_gib: overrides the bound of packed segments; None: what fits, up to 2 GiB.
        share: of this KV cache group in what is left.
    """
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    workers = parallel.world_size * max(1, parallel.data_parallel_size_local)
    blocks = cache.num_gpu_blocks or 0
    kv_bytes = max(blocks * kv_bytes_per_block, cache.kv_cache_memory_bytes or 0)
    free = get_memory_node_info(get_allowed_cpu_list()[0].numa_node).available_memory
    room = int(max(min(free, _cgroup_room()) / workers - kv_bytes, 0) * share / 2)
    tokens = vllm_config.scheduler_config.max_num_batched_tokens
    partials = min(tokens * bytes_per_token, room // 2 // _STEPS)
    packed = min(room - _STEPS * partials, _MOST_PACKED)
    if max_copy_gib is not None:
        packed = int(max_copy_gib * 2**30)
    return MemoryBound(packed, partials)


def _cgroup_room() -> float:
    """Bytes that the cgroups of this process leave it; vLLM looks at the outermost one alone.

    Of version 2, at the usual place. Pages of files count as free.
    """
    try:
        found = re.search(r"^0::/?(.*)$", _OWN_CGROUP.read_text(), re.MULTILINE)
    except OSError:
        return math.inf
    folder, room = _CGROUPS / (found[1] if found else ""), math.inf
    while folder != _CGROUPS.parent:
        try:
            used = int((folder / "memory.current").read_text())
            stat = dict(x.split() for x in (folder / "memory.stat").read_text().splitlines())
            files = int(stat["active_file"]) + int(stat["inactive_file"])
            room = min(room, int((folder / "memory.max").read_text()) - used + files)
        except (OSError, ValueError, KeyError):
            pass  # no limit, or no such file
        folder = folder.parent
    return max(room, 0)
