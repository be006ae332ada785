"""Measurement inside the workers of a running engine."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

from vllm_relay.backend.cpu_impl import RelayImpl
from vllm_relay.calibration.measure import THOROUGH, measure
from vllm_relay.calibration.probe import Probe
from vllm_relay.ops.native.prepared import AttentionShape


class Calibrator:
    """Adds a method to the engine's workers (vLLM's ``worker_extension_cls``)."""

    def measure_attention(self) -> list[dict[str, Any]]:
        """A `Measurement` of each head shape, as plain data."""
        return [
            asdict(measure(Probe(*probed, THOROUGH.kv_bytes), THOROUGH))
            for probed in probed_layers(self)
        ]


def probed_layers(
    worker: Any,
) -> Iterator[tuple[CPUAttentionMetadataBuilder, Any, AttentionShape]]:
    """A builder, a layer of it and its shape without window and cap: one for each head shape.

    Raises:
        ValueError: relay serves no layer.
    """
    context = worker.vllm_config.compilation_config.static_forward_context
    seen = set()
    for groups in worker.model_runner.attn_groups:
        for group in groups:
            builder = group.get_metadata_builder()
            for layer in map(context.get, builder.layer_names):
                impl = getattr(layer, "impl", None)
                if not isinstance(impl, RelayImpl) or impl.shape is None:
                    continue
                plain = replace(impl.shape, softcap=0.0, window=0)
                if plain not in seen:
                    seen.add(plain)
                    yield builder, layer, plain
    if not seen:
        raise ValueError("relay's CPU backend does not serve this model")
