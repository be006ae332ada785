"""Hostile cases of parsers of text and settings: measured costs, request logs, settings."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from tests.soak.hostile_mutants import JUNK, changed, damaged, text
from vllm_relay.config import RelayConfig
from vllm_relay.explain.trace import read_trace
from vllm_relay.sharing import Planner
from vllm_relay.sharing.cost_store import SHIPPED, find_costs, load, save

Case = Callable[[Random], bool]


def accepted(call: Callable[[], Any], refusal: type[ValueError] = ValueError) -> bool:
    """True if the call returns, False if it is refused in one line; else an error."""
    try:
        call()
    except refusal as error:
        lines = str(error).splitlines()
        assert len(lines) == 1, f"not one line: {str(error)!r}"
        lines[0].encode()  # or it cannot be printed
        return False
    return True


def _several(rng: Random, value: Any, junk: tuple[Any, ...] = JUNK) -> Any:
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        value = changed(rng, value, junk)
    return value


def make_costs_case(folder: Path) -> Case:
    """Measured costs; what is accepted plans a step."""
    path, entries = folder / "devices.json", json.loads(SHIPPED.read_text())[:2]
    shipped = load(SHIPPED)
    table = np.array([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 7]], dtype=np.int32)
    lens, queries = np.array([60, 64, 50], dtype=np.int32), np.array([1, 3, 1], dtype=np.int32)

    def use(rng: Random) -> None:
        found = find_costs(
            *rng.choice(((8, 2, 64), (1, 1, 16), (128, 8, 256))),
            device=rng.choice((entries[0]["device"], "another")),
            dtype=rng.choice(("bfloat16", "float32")),
            threads=rng.choice((None, 1, 2)),
            files=[path],
        )
        Planner(16, found.costs.with_margin(found.margin), 3).plan(table, lens, queries)
        if rng.random() < 0.1:
            save(shipped, path)
            assert shipped[0] in load(path)

    def case(rng: Random) -> bool:
        path.write_bytes(text(rng, _several(rng, entries)))
        return accepted(lambda: use(rng))

    return case


def make_trace_case(folder: Path) -> Case:
    """Request logs of all four kinds of rows."""
    path = folder / "log.jsonl"
    rows: list[dict[str, Any]] = [
        {"timestamp": 1, "input_length": 1200, "output_length": 5, "hash_ids": [7, 8, 9]},
        {"timestamp": 2.5, "prompt_token_ids": [5] * 40, "output_length": 3},
        {"prompt": "Who are you?", "max_tokens": 7},
        {"prompt": [1, 2, 3], "output_length": 1},
        {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 2},
    ]

    def tokenize(prompt: str | list[Any]) -> list[int]:
        said = prompt if isinstance(prompt, str) else "".join(m["content"] for m in prompt)
        return [ord(character) for character in said]

    def case(rng: Random) -> bool:
        chosen = _several(rng, [rng.choice(rows) for _ in range(rng.randint(1, 3))])
        lines = [text(rng, row) for row in chosen] if isinstance(chosen, list) else [b"[]"]
        content = rng.choice((b"\n", b"\n", b"\r\n", b"\n\n")).join(lines)
        path.write_bytes(damaged(rng, content) if rng.random() < 0.1 else content)
        blocks, tokens = rng.choice((None, 1, 16, 512)), rng.choice((None, tokenize, tokenize))
        return accepted(lambda: read_trace(path, blocks, tokens))

    return case


# Beside what JSON can say, what a caller of `LLM(additional_config=…)` can.
_PYTHON = (
    b"x", (1, 2), {1, 2}, 1j, Path("a"), np.float64("nan"), np.int64(3), range(3), {1: 2}, object(),
    {None: 1}, {"enabled": True}, ["a", "a"], ["a", 1], {"files": "a"}, [Path("a"), Path("a\nb")],
)  # fmt: skip


def make_settings_case(folder: Path) -> Case:
    """Settings, as ``additional_config`` has them."""
    defaults = {"relay": json.loads(json.dumps(asdict(RelayConfig())))}
    given: dict[str, Any] = {
        "relay": {
            "enabled": True,
            "min_saved_tokens": 0,
            "max_levels": 2,
            "max_copy_gib": 0.5,
            "system_kv": {"files": ["a.relay", "b.relay"], "budget": 0.3, "errors": "skip"},
        }
    }
    bases = (defaults, given, {"relay": {"system_kv": ["a.relay"]}}, {})

    def case(rng: Random) -> bool:
        mutant = _several(rng, rng.choice(bases), (*JUNK, *_PYTHON))
        return accepted(lambda: RelayConfig.from_additional_config(mutant))

    return case
