"""Counters of relayed steps in this process, and relay's lines in vLLM's log.

Only an engine's workers count: ``llm.collective_rpc("relay_counters")`` asks them.
"""

import logging
import time
import weakref
from collections import Counter
from collections.abc import Callable
from multiprocessing import util
from typing import Protocol

from vllm_relay.plan import SharingStats

REPORT_SECONDS = 60.0
# A child of vLLM's own logger: its handlers, format and level apply.
logger = logging.getLogger("vllm.relay")


# Groups that are shown of a step, and seconds after which they are no longer those of now.
MOST_GROUPS, _GROUPS_SECONDS = 20, 5.0

# `DevicePlan.newest`: the last step and the totals; its argument: wait for steps in progress.
Newest = Callable[[bool], tuple[SharingStats, SharingStats]]
# `sharing.largest_groups` of a step: at most so many of them.
Groups = Callable[[int], list[dict[str, int]]]

_total = SharingStats()
_kv_bytes_not_read = 0
_predicted_saved_seconds = _planning_seconds = 0.0
_fallbacks: Counter[str] = Counter()
# Plans on a device keep counters there: the method that reads them, and KV bytes of a token.
_devices: list[tuple["weakref.WeakMethod[Newest]", int]] = []
# The latest step's groups by who planned it, and when; packed segments of each.
_groups: "weakref.WeakKeyDictionary[object, tuple[float, Groups]]" = weakref.WeakKeyDictionary()
_packed: "weakref.WeakSet[Packed]" = weakref.WeakSet()
_said: set[str] = set()
_speaks = True
_reported_at = 0.0


class Packed(Protocol):
    """Packed segments of a KV cache group."""

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""


def counters(wait: bool = True) -> dict[str, float]:
    """The counters of this process since it started.

    Args:
        wait: True waits for steps that a device is still planning; False leaves them out.

    Returns:
        steps: planned, per KV cache group. steps_relayed: those with at least one group.
        steps_ungrouped: those on the CPU kernels without a group.
        groups, requests: sums over relayed steps. tokens_shared: KV tokens of their segments.
        kv_bytes_not_read: KV bytes that vLLM's own path would have read in addition, all layers.
        predicted_saved_seconds: attention of all layers, against vLLM's own, by the cost model, on
            the CPU. planning_seconds: of the engine's process there.
        fallbacks: failures that were left to vLLM's own attention; ``fallbacks_…`` by what failed.
    """
    total, kv_bytes = _total, _kv_bytes_not_read
    for reference, kv_bytes_per_token in _devices:
        if newest := reference():  # vLLM makes builders for a try and drops them
            on_device = newest(wait)[1]
            total += on_device
            kv_bytes += on_device.tokens_saved * kv_bytes_per_token
    names = ("steps", "steps_relayed", "steps_ungrouped", "groups", "requests", "tokens_shared")
    return {
        **{name: getattr(total, name) for name in names},
        "kv_bytes_not_read": kv_bytes,
        "predicted_saved_seconds": round(_predicted_saved_seconds, 6),
        "planning_seconds": round(_planning_seconds, 6),
        "fallbacks": _fallbacks.total(),
        **{f"fallbacks_{doing}": count for doing, count in dict(_fallbacks).items()},
    }


def count_step(
    stats: SharingStats, kv_bytes_not_read: int, saved_seconds: float, planning_seconds: float
) -> None:
    """Count one planned step; arguments as in `counters`."""
    global _total, _kv_bytes_not_read, _predicted_saved_seconds, _planning_seconds
    _total += stats
    _kv_bytes_not_read += kv_bytes_not_read
    _predicted_saved_seconds += saved_seconds
    _planning_seconds += planning_seconds
    log_sharing(stats)


def show_groups(planner: object, groups: Groups | None) -> None:
    """Show these groups as those of the planner's latest step; None: it has none."""
    _groups[planner] = time.monotonic(), groups or (lambda most: [])


def groups() -> list[dict[str, int]]:
    """Groups of the latest step, of the KV cache group that saves most; none after an idle time."""
    since = time.monotonic() - _GROUPS_SECONDS
    found = [shown(MOST_GROUPS) for at, shown in list(_groups.values()) if at >= since]
    return max(found, key=lambda x: sum((g["requests"] - 1) * g["tokens"] for g in x), default=[])


def follow_packed(packed: Packed) -> None:
    """Add these packed segments to `packed_bytes`, as long as they live."""
    _packed.add(packed)


def packed_bytes() -> int:
    """Bytes of this process's packed segments."""
    return sum(packed.nbytes for packed in list(_packed))


def count_fallback(doing: str) -> None:
    """Count one failure that was left to vLLM's own attention."""
    _fallbacks[doing] += 1


def follow_device(newest: Newest, kv_bytes_per_token: int) -> None:
    """Add the counters of a plan on a device to this process's, as long as the plan lives."""
    _devices.append((weakref.WeakMethod(newest), kv_bytes_per_token))


def log_sharing(stats: SharingStats) -> None:
    """Log the first step that shares, then the counters every `REPORT_SECONDS`.

    The line at exit is not certain: unless ``--shutdown-timeout`` gives them time, vLLM kills its
    workers when a server stops.
    """
    global _reported_at
    now = time.monotonic()
    if not _speaks or not stats.groups:
        return
    if not _reported_at:
        logger.info(
            "relay: %d requests share %s tokens in %d group%s: %.0f %% fewer KV reads",
            stats.requests,
            f"{stats.tokens_shared:,}",
            stats.groups,
            "" if stats.groups == 1 else "s",
            100 * stats.tokens_saved / stats.tokens_stock,
        )
    elif now - _reported_at < REPORT_SECONDS:
        return
    else:
        _log_counters()
    _reported_at = now


def say_once(message: str, level: int = logging.WARNING) -> None:
    """Log ``relay: message``, once per process."""
    if _speaks and message not in _said:
        _said.add(message)
        logger.log(level, "relay: %s", message)


def set_speaker(speaks: bool) -> None:
    """Let this process write to the log or not: one of an engine's workers does."""
    global _speaks
    _speaks = speaks


def report_at_exit() -> None:
    """Log the counters when this process ends in order. Idempotent."""
    if _speaks and "report" not in _said:
        _said.add("report")
        # multiprocessing's finalizers run in forked workers too, atexit does not.
        util.Finalize(None, _log_counters, exitpriority=0)


def _log_counters() -> None:
    counted = counters(wait=False)
    logger.info("relay: %s", " ".join(f"{name}={value}" for name, value in counted.items()))
