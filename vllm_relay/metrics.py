"""Counters of what relay did in this process, and the lines it writes to vLLM's log.

In another process than the engine's workers the counters stay zero; ask the workers:
``llm.collective_rpc("relay_counters")``.
"""

import logging
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing import util

from vllm_relay.plan import SharingStats as Report
from vllm_relay.sharing import RelayPlan

REPORT_SECONDS = 60.0
# A child of vLLM's own logger: its handlers, format and level apply.
logger = logging.getLogger("vllm.relay")


@dataclass
class _Counters:
    steps: int = 0
    steps_relayed: int = 0
    groups: int = 0
    requests: int = 0
    tokens_shared: int = 0
    kv_bytes_not_read: int = 0


_counters = _Counters()
# Plans on a device count there: how to ask each, as long as it lives, and KV bytes of a token.
_devices: list[tuple["weakref.WeakMethod[Callable[[bool], tuple[Report, Report]]]", int]] = []
_said: set[str] = set()
_speaks = True
_reported_at = 0.0


def counters(wait: bool = True) -> dict[str, int]:
    """What this process counted since it started.

    Args:
        wait: for the steps that a device is still planning; else they are left out.

    Returns:
        steps: steps planned, per KV cache group. steps_relayed: those with at least one group of
            requests.
        groups, requests: sums over relayed steps. tokens_shared: KV tokens of segments, once per
            group and step.
        kv_bytes_not_read: KV bytes that vLLM's own path would have read in addition, all layers of
            this worker.
    """
    found = asdict(_counters)
    for entry in list(_devices):
        reference, kv_bytes_per_token = entry
        newest = reference()
        if newest is None:
            # of a builder that vLLM made for a try
            _devices.remove(entry)
            continue
        total = newest(wait)[1]
        for name in ("steps", "steps_relayed", "groups", "requests", "tokens_shared"):
            found[name] += getattr(total, name)
        found["kv_bytes_not_read"] += total.tokens_saved * kv_bytes_per_token
    return found


def count_step(plan: RelayPlan | None, kv_bytes_per_token: int) -> None:
    """Count one planned step.

    Args:
        plan: None when nothing is relayed. kv_bytes_per_token: KV bytes of one token over all
            relayed layers.
    """
    _counters.steps += 1
    if plan is None:
        return
    if _counters.steps_relayed == 0:
        _announce(
            len(plan.rows),
            plan.tokens_shared,
            plan.num_groups,
            plan.tokens_stock - plan.tokens_relay,
            plan.tokens_stock,
        )
    _counters.steps_relayed += 1
    _counters.groups += plan.num_groups
    _counters.requests += len(plan.rows)
    _counters.tokens_shared += plan.tokens_shared
    _counters.kv_bytes_not_read += (plan.tokens_stock - plan.tokens_relay) * kv_bytes_per_token
    _report_now_and_then()


def follow_device(newest: Callable[[bool], tuple[Report, Report]], kv_bytes_per_token: int) -> None:
    """Count what a plan on a device counts there, as long as it lives.

    Args:
        newest: `DevicePlan.newest`. kv_bytes_per_token: as in `count_step`.
    """
    _devices.append((weakref.WeakMethod(newest), kv_bytes_per_token))


def hear_device(last: Report) -> None:
    """Write to the log as `count_step` does, from the last step that a device told of."""
    if last.groups == 0:
        return
    if _reported_at == 0.0:
        _announce(
            last.requests, last.tokens_shared, last.groups, last.tokens_saved, last.tokens_stock
        )
    _report_now_and_then()


def _announce(requests: int, shared: int, groups: int, saved: int, stock: int) -> None:
    """One line when something is shared for the first time; the last three are KV tokens."""
    global _reported_at
    _reported_at = time.monotonic()
    if _speaks:
        logger.info(
            "relay: %d requests share %s tokens in %d group%s: %.0f %% fewer KV reads",
            requests,
            f"{shared:,}",
            groups,
            "" if groups == 1 else "s",
            100 * saved / stock,
        )


def say_once(message: str, level: int = logging.WARNING) -> None:
    """Log ``relay: message`` the first time this process meets it."""
    if _speaks and message not in _said:
        _said.add(message)
        logger.log(level, "relay: %s", message)


def set_speaker(speaks: bool) -> None:
    """Whether this process writes to the log: of an engine's workers one does."""
    global _speaks
    _speaks = speaks


def report_at_exit() -> None:
    """Log one line with the counters when this process ends in order. Idempotent."""
    if _speaks and "report" not in _said:
        _said.add("report")
        # multiprocessing's finalizers run in forked workers too, atexit does not.
        util.Finalize(None, _log_counters, exitpriority=0)


def _report_now_and_then() -> None:
    """One line every `REPORT_SECONDS` while steps are relayed.

    The line at exit is not certain: unless ``--shutdown-timeout`` gives them time, vLLM kills its
    workers when a server stops.
    """
    global _reported_at
    now = time.monotonic()
    if _speaks and now - _reported_at >= REPORT_SECONDS:
        _reported_at = now
        _log_counters()


def _log_counters() -> None:
    counted = counters(wait=False)
    logger.info("relay: %s", " ".join(f"{name}={value}" for name, value in counted.items()))
