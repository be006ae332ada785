"""Costs that an engine plans by: measured on this machine before, or at its start."""

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

from vllm_relay import metrics
from vllm_relay.calibration.fitting import versions
from vllm_relay.calibration.measure import QUICK, measure
from vllm_relay.calibration.probe import Probe
from vllm_relay.ops.native import library as native
from vllm_relay.ops.native.prepared import AttentionShape
from vllm_relay.sharing import Costs
from vllm_relay.sharing.cost_store import (
    MARGIN,
    MARGIN_OF_A_GUESS,
    SHIPPED,
    Constants,
    cpu_name,
    find_costs,
    load,
    save_locked,
    user_file,
)
from vllm_relay.sharing.whole_files import locked

# Measured in this process; another KV cache group may have the same heads.
_measurements: list[Constants] = []


def load_or_measure(
    builder: CPUAttentionMetadataBuilder, layer: Any, shape: AttentionShape
) -> Costs:
    """Costs of a layer's attention on this machine, with the margin to plan by. Never raises.

    Measured now, in a few seconds, and kept in the user's file, unless it has a measurement of this
    device, its kernels and versions, threads and heads. A rough measurement is used, but not kept.
    Where none can be made, those stand in that are shipped.

    Args:
        builder, layer: as `Probe` takes them. shape: of the layer's attention.
    """
    key: dict[str, Any] = {
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "head_size": shape.head_size,
        "dtype": str(shape.dtype).removeprefix("torch."),
        "device": cpu_name(builder.isa, native.loaded().isa),
        "threads": torch.get_num_threads(),
    }
    try:
        found, margin = _load(key), MARGIN
        if found is None:
            with _one_at_a_time():
                found = _load(key)  # another worker may have measured meanwhile
                if found is None:
                    found, margin = _measure(builder, layer, shape)
    except Exception as error:
        metrics.say_once(f"attention could not be measured: {type(error).__name__}: {error}")
        guess = find_costs(**key, files=[SHIPPED])
        metrics.say_once(guess.source)
        return guess.costs.with_margin(guess.margin)
    costs = found.costs(shape.heads, shape.kv_heads, shape.head_size, key["dtype"])
    return costs.with_margin(margin)


def _load(key: dict[str, Any]) -> Constants | None:
    """The measurement of this machine that was made here or is in the user's file."""
    entries = list(_measurements)
    try:
        entries += load(user_file())
    except ValueError as error:
        metrics.say_once(str(error))
    alike = (x for x in entries if all(getattr(x, name) == value for name, value in key.items()))
    return next((x for x in alike if x.measured.endswith(versions())), None)


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """The lock under which a worker measures; others that start with it wait.

    Side by side, on the same cores or the same memory, they would all measure badly.
    """
    with ExitStack() as stack:
        try:
            folder = user_file().parent
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(folder))
        except (OSError, ValueError):
            pass  # nothing is kept there, so there is nothing to wait for
        yield


def _measure(
    builder: CPUAttentionMetadataBuilder, layer: Any, shape: AttentionShape
) -> tuple[Constants, float]:
    """A new measurement and its margin."""
    heads = f"{shape.heads}/{shape.kv_heads} heads of {shape.head_size}"
    metrics.say_once(f"timing attention of {heads}, a few seconds", logging.INFO)
    started = time.monotonic()
    # Costs are those of a layer that sees all keys.
    plain = replace(shape, softcap=0.0, window=0)
    found = measure(Probe(builder, layer, plain, QUICK.kv_bytes), QUICK)
    took = f"attention of {heads} timed in {time.monotonic() - started:.1f} s"
    if found.rough:
        metrics.say_once(f"{took}, roughly: not kept", logging.INFO)
        return found.constants, MARGIN_OF_A_GUESS
    _measurements.append(found.constants)
    try:
        path = user_file()
        save_locked([found.constants], path)
        metrics.say_once(f"{took}, kept in {path}", logging.INFO)
    except (OSError, ValueError) as error:
        metrics.say_once(f"{took}, not kept: {error}", logging.INFO)
    return found.constants, MARGIN
