"""Request logs for tests: trees of prompts, random ones, and files of them."""

import json
import random
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def tree(nodes: list[int], tokens: list[int], block_tokens: int, output: int = 1) -> list[Row]:
    """One request per leaf of a tree with so many nodes, of so many tokens each, on every level."""
    rows = []
    for leaf in range(nodes[-1]):
        hash_ids = []
        for level, (count, length) in enumerate(zip(nodes, tokens, strict=True)):
            node = leaf * count // nodes[-1]
            for block in range(length // block_tokens):
                hash_ids.append(level * 10**8 + node * 10**3 + block)
        rows.append(row(sum(tokens), output, hash_ids))
    return rows


def row(input_length: int, output_length: int, hash_ids: list[int], timestamp: float = 0) -> Row:
    return {
        "timestamp": timestamp,
        "input_length": input_length,
        "output_length": output_length,
        "hash_ids": hash_ids,
    }


def conversations(rng: random.Random, count: int, block_tokens: int) -> list[Row]:
    """Prompts that are a beginning of an earlier one, then new blocks; a last one partly filled.

    Few ids, so that the same ones come again after other blocks.
    """
    rows: list[Row] = []
    for _ in range(count):
        ids: list[int] = []
        if rows and rng.random() < 0.8:
            source = rng.choice(rows)["hash_ids"]
            ids = source[: rng.randint(0, len(source))]
        ids = [*ids, *(rng.randrange(6) for _ in range(rng.randint(1, 5)))]
        tokens = len(ids) * block_tokens - rng.randrange(block_tokens)
        rows.append(row(tokens, rng.choice([0, 1, 2, 7, 20]), ids, rng.randrange(5)))
    return rows


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
