"""Prefixes pinned by hand: commands in ``kv_transfer_params`` of requests, and their answers.

A request with ``{"relay": {"pin": true}}`` leaves the KV blocks of its prompt referenced when it
ends, so that nothing evicts them. ``unpin`` (a label), ``list`` and ``save`` are the others. They
come through vLLM's own API, behind its key, and no process or port is added.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import blake3
from vllm.v1.request import RequestStatus

from vllm_relay import metrics
from vllm_relay.system_kv.file import SystemKVError
from vllm_relay.system_kv.known_prefixes import Prefix
from vllm_relay.system_kv.pinned_blocks import hit_length
from vllm_relay.system_kv.placement import budget_error
from vllm_relay.system_kv.warm_start import cached_blocks

# Prompts pinned at a time: each is kept, and compared with every request.
_MOST = 256
# Label of all pins together in metrics: those that come and go would make ever new ones.
LABEL = "(pins)"
_FORMS = '{"pin": true}, {"unpin": LABEL}, {"list": true} or {"save": true}'


@dataclass(kw_only=True)
class _Pin:
    """A pinned prefix: its blocks, and requests and tokens that found them."""

    prefix: Prefix
    salted: bool
    blocks: list[Any]
    block_ids: list[int]
    requests_hit: int = 0
    tokens_hit: int = 0


def command_of(request: Any) -> Any:
    """The command that a request brings, of any form, or None."""
    given = request.kv_transfer_params
    return given.get("relay") if isinstance(given, Mapping) else None


def is_save(request: Any) -> bool:
    """True if a request brings the command ``save``."""
    return command_of(request) == {"save": True}


def answer(pins: "Pins | None", request: Any) -> dict[str, Any] | None:
    """``kv_transfer_params`` of the response to a finished request; None: it brings no command."""
    if command_of(request) is None:
        return None
    if pins is None:
        needs = "system_kv.pins, and a model with one kind of KV cache and no window"
        return {"relay": {"error": f"this engine pins nothing: it needs {needs}"}}
    return {"relay": pins.answer(request)}


class Pins:
    """The prefixes pinned by hand in one block pool with one KV cache group.

    Args:
        block_size: tokens of a KV block. budget: share of the blocks that may be pinned.
        max_model_len: tokens of the longest request; it takes ``longest`` blocks.
        saved: names of the files of the last round that ``save`` waited for, or None if nothing is
            saved on this engine.
    """

    def __init__(
        self,
        *,
        block_size: int,
        budget: float,
        max_model_len: int,
        longest: int,
        saved: Callable[[], list[str]] | None,
    ) -> None:
        self._block_size, self._budget = block_size, budget
        self._max_model_len, self._longest = max_model_len, longest
        self._saved = saved
        self._pins: dict[str, _Pin] = {}
        self._requests_hit = self._tokens_hit = 0
        self._used = False

    def attach(self, pool: Any, loaded: Callable[[], set[int]]) -> None:
        """Begin with a pool; ``loaded``: ids of the blocks of system KVs from files."""
        self._pool, self._loaded = pool, loaded

    def answer(self, request: Any) -> dict[str, Any]:
        """Carry out a finished request's command; the answer has ``error`` where it cannot be."""
        try:
            return self._carry_out(request)
        except Exception as error:
            if not isinstance(error, SystemKVError):
                metrics.count_fallback("pinning")
            return {"error": " ".join(str(error).split())}

    def _carry_out(self, request: Any) -> dict[str, Any]:
        match command_of(request):
            case {"pin": True, **rest} if not rest:
                label = self._pin(request)
                return {"pinned": self._entry(label)}
            case {"unpin": str(label), **rest} if not rest:
                if label not in self._pins:
                    raise SystemKVError(f"no pin {label!r}; there are: {', '.join(self._pins)}")
                entry = self._entry(label)
                self._free([self._pins.pop(label)])
                return {"unpinned": entry}
            case {"list": True, **rest} if not rest:
                return {"pins": [self._entry(label) for label in self._pins]}
            case {"save": True, **rest} if not rest:
                if self._saved is None:
                    raise SystemKVError("nothing is saved: start with system_kv.remember")
                return {"saved": self._saved()}
            case other:
                raise SystemKVError(f"kv_transfer_params['relay'] must be {_FORMS}, got {other!r}")

    def _pin(self, request: Any) -> str:
        """Pin a finished request's prompt; returns the label, the same if it is pinned already."""
        if request.prompt_token_ids is None or request.prompt_embeds is not None:
            raise SystemKVError("only prompts of tokens can be pinned")
        if self._pool.hash_block_size != self._block_size:
            raise SystemKVError(f"blocks of {self._block_size} tokens have no hash of their own")
        if request.mm_features:
            raise SystemKVError("prompts with images, audio or video cannot be pinned")
        if request.status == RequestStatus.FINISHED_ABORTED:
            raise SystemKVError("the request was aborted")
        tokens = len(request.prompt_token_ids)
        count = tokens // self._block_size
        if not count:
            raise SystemKVError(
                f"the prompt has {tokens:,} tokens, less than one KV block of {self._block_size}"
            )
        token_ids = tuple(request.prompt_token_ids[: count * self._block_size])
        adapter = request.lora_request and request.lora_request.lora_name
        content = json.dumps([token_ids, request.cache_salt, adapter])
        label = blake3.blake3(content.encode()).hexdigest()[:8]
        if label in self._pins:
            return label
        if len(self._pins) >= _MOST:
            raise SystemKVError(f"{_MOST} prompts are pinned, which is the most: unpin one")
        hashes = tuple(request.block_hashes[:count])
        blocks = cached_blocks(self._pool, hashes)
        if len(blocks) < count:
            raise SystemKVError("the prompt's KV is not cached: is it more than the KV cache?")
        error = budget_error(
            len(self._loaded() | self.block_ids() | {block.block_id for block in blocks}),
            len(self._pool.blocks) - 1,
            self._budget,
            self._max_model_len,
            self._longest,
        )
        if error is not None:
            raise SystemKVError(error)
        self._pool.touch(blocks)
        self._used = True
        self._pins[label] = _Pin(
            prefix=Prefix(hashes=hashes, token_ids=token_ids),
            salted=request.cache_salt is not None or adapter is not None,
            blocks=blocks,
            block_ids=[block.block_id for block in blocks],
        )
        return label

    def _entry(self, label: str) -> dict[str, Any]:
        pin = self._pins[label]
        return {
            "label": label,
            "tokens": len(pin.prefix.token_ids),
            "blocks": len(pin.blocks),
            "requests_hit": pin.requests_hit,
            "tokens_hit": pin.tokens_hit,
        }

    def block_ids(self) -> set[int]:
        """All pinned blocks."""
        return {block_id for pin in self._pins.values() for block_id in pin.block_ids}

    def prefixes(self) -> list[Prefix]:
        """The pinned prefixes without a salt or an adapter, in the order of their pinning."""
        return [pin.prefix for pin in self._pins.values() if not pin.salted]

    def count_hit(self, blocks: Sequence[Any]) -> None:
        """Count a request with these blocks for the pin that it shares most of."""
        ids = [block.block_id for block in blocks]
        have = {label: hit_length(pin.block_ids, ids) for label, pin in self._pins.items()}
        label = max(have, key=lambda x: have[x], default="")
        if label and have[label]:
            tokens = have[label] * self._block_size
            self._pins[label].requests_hit += 1
            self._pins[label].tokens_hit += tokens
            self._requests_hit += 1
            self._tokens_hit += tokens

    def counts(self) -> dict[str, dict[str, int]]:
        """Counters of all pins since the start, in the form of `PinnedBlocks.counts`."""
        if not self._used:
            return {}
        counts = {"requests_hit": self._requests_hit, "tokens_hit": self._tokens_hit}
        return {LABEL: {**counts, "blocks": len(self.block_ids())}}

    def release(self) -> None:
        """Give all blocks back after a reset of the prefix cache: requests find none of them."""
        if self._pins:
            metrics.logger.warning(
                "relay: the prefix cache was reset: %d pinned prefixes are given up; pin them anew",
                len(self._pins),
            )
            self._free(list(self._pins.values()))
            self._pins.clear()

    def _free(self, pins: Sequence[_Pin]) -> None:
        for pin in pins:
            self._pool.free_blocks(reversed(pin.blocks))
