"""The layers of a running engine: which are relayed, why others are not, when sharing pays."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vllm.v1.attention.backend import AttentionType


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer that keeps state of a sequence.

    Attributes:
        name: vLLM's. kind: its class, or whose keys its attention sees.
        group: its KV cache group's number; None where it is in none.
        reason: why it stays on vLLM's own path; None where it is relayed.
        heads, kv_heads, head_size: of attention, on this rank. window: tokens that a query sees, 0:
            all.
        kv_bytes: of a token; 0 for KV of another layer and for a state that tokens do not add to.
        pays_from: fewest decodes for which a shared prefix is relayed, of each length asked for;
            None where more are needed. Empty where the layer is not relayed.
    """

    name: str
    kind: str
    group: int | None
    reason: str | None
    heads: int = 0
    kv_heads: int = 0
    head_size: int = 0
    window: int = 0
    kv_bytes: int = 0
    pays_from: Sequence[int | None] = ()


class LayerReporter:
    """Methods of the engine's workers (vLLM's ``worker_extension_cls``)."""

    def report_layers(self, prefixes: Sequence[int], most: int) -> list[dict[str, Any]]:
        """A `Layer` of each, as plain data, in the model's order.

        Args:
            prefixes: for `Layer.pays_from`, in tokens; the next whole block counts. most: requests.
        """
        most = min(most, self.vllm_config.scheduler_config.max_num_seqs)  # type: ignore[attr-defined]
        return [asdict(layer) for layer in _layers(self, prefixes, most)]

    def refuse_system_kv(self) -> str | None:
        """Why a file cannot hold the model's KV, or None."""
        from vllm_relay.system_kv.cache_groups import refusal

        return refusal(self.model_runner.kv_cache_config)  # type: ignore[attr-defined]


def _least(builder: Any, prefix: int, most: int) -> int | None:
    block = builder.kv_cache_spec.block_size
    counts = range(2, most + 1)
    tokens = -(-prefix // block) * block
    at = bisect_left(counts, True, key=lambda n: builder.could_save(n, tokens))
    return counts[at] if at < len(counts) else None


def _layers(worker: Any, prefixes: Sequence[int], most: int) -> Iterator[Layer]:
    groups: dict[str, tuple[int | None, Any, list[int | None]]] = {}
    for index, alike in enumerate(worker.model_runner.attn_groups):
        for group in alike:
            builder = group.get_metadata_builder()
            plans = hasattr(builder, "could_save") and builder.refusal is None
            least = [_least(builder, x, most) for x in prefixes if plans]
            groups |= dict.fromkeys(group.layer_names, (index, builder, least))
    for name, layer in worker.vllm_config.compilation_config.static_forward_context.items():
        number, builder, least = groups.get(name, (None, None, []))
        impl: Any = getattr(layer, "impl", None)
        if builder is None and impl is None:
            continue  # no state: of experts, for example
        spec = getattr(builder, "kv_cache_spec", None)
        theirs = getattr(layer, "kv_sharing_target_layer_name", None) is not None
        common: dict[str, Any] = {
            "name": name,
            "group": number,
            "kv_bytes": 0 if theirs else _kv_bytes(spec),
        }
        if not hasattr(impl, "refusal"):  # neither backend's `RelayImpl`
            title = type(layer if impl is None else impl).__name__
            yield Layer(kind=type(layer).__name__, reason=f"relay has no {title}", **common)
            continue
        reason = impl.refusal or getattr(builder, "refusal", None)
        if builder is None:
            reason = reason or "in no KV cache group"
        yield Layer(
            kind=f"{AttentionType(impl.attn_type).value} attention",
            reason=reason,
            heads=impl.num_heads,
            kv_heads=impl.num_kv_heads,
            head_size=impl.head_size,
            window=getattr(layer, "sliding_window", None) or 0,
            pays_from=least if reason is None else [],
            **common,
        )


def _kv_bytes(spec: Any) -> int:
    if not hasattr(spec, "head_size"):  # of Mamba and its kind
        return 0
    return int(spec.page_size_bytes // spec.block_size)
