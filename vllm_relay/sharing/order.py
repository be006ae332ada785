"""An order of prompts for offline batches, in which those that share a prefix run together."""

import json
from collections.abc import Mapping, Sequence
from typing import Any


def order(prompts: Sequence[Any]) -> list[int]:
    """Indices of the prompts, those with the longest prefixes in common next to one another.

    An engine takes requests in the order given. In this one the requests of a prefix come together,
    and share it while it is in the KV cache. It is that of the leaves of the prompts' trie, depth
    first; equal prompts keep theirs. For vLLM::

        at = vllm_relay.order(prompts)
        done = llm.generate([prompts[i] for i in at], sampling_params)
        outputs = [output for _, output in sorted(zip(at, done), key=lambda pair: pair[0])]

    Args:
        prompts: each as vLLM takes it: text, token ids, a dictionary with ``prompt`` or
            ``prompt_token_ids``, or a list of chat messages. All text and messages, or all tokens.

    Raises:
        TypeError: something else; names the prompt.
    """
    keys = [_key(prompt, index) for index, prompt in enumerate(prompts)]
    other = next((i for i, key in enumerate(keys) if type(key) is not type(keys[0])), None)
    if other is not None:
        raise TypeError(f"prompts: 0 and {other} are text and tokens, which have no common order")
    return sorted(range(len(keys)), key=keys.__getitem__)


def _key(prompt: Any, index: int) -> str | tuple[int, ...]:
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
    if isinstance(prompt, str):
        return prompt
    try:
        parts = list(prompt)
        if parts and isinstance(parts[0], Mapping):
            return json.dumps(parts, ensure_ascii=False)
        return tuple(map(int, parts))
    except (TypeError, ValueError):
        kind = type(prompt).__name__
        raise TypeError(f"prompts: {index} is neither text, tokens nor messages: {kind}") from None
