"""Relay is no further from an fp32 run than twice the distance of vLLM's own bf16 run.

All runs produce the same tokens (those that the fp32 run chose), so log-probabilities are compared
position by position. The same comparison must fail with an error planted in the relay path, or it
would prove nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.random_model import VOCABULARY
from tests.engine.engine import run_engine

STEPS = 32
# With a planted error: it shows at once.
STEPS_PLANTED = 16
BLOCK = 128
# tokens of each group's shared prefix, its members, and tokens that each member adds
GROUPS = ((600, 14, 60), (420, 10, 60), (300, 8, 90))
UNGROUPED = 5
# Prompts of a tree: so many system prompts, documents below each and samples of each, and tokens of
# a system prompt, a document and a sample's own.
TREE, TREE_TOKENS = (2, 3, 4), (300, 280, 60)


def _source(tokens: np.ndarray) -> Callable[[int], list[int]]:
    source = iter(tokens.tolist())
    return lambda count: [next(source) for _ in range(count)]


def _tree(tokens: np.ndarray) -> tuple[list[list[int]], list[list[int]]]:
    """A prompt per document to warm the cache; samples of all documents, shuffled."""
    take = _source(tokens)
    systems, documents, samples = TREE
    warm_up, prompts = [], []
    for _ in range(systems):
        system = take(TREE_TOKENS[0])
        for _ in range(documents):
            document = system + take(TREE_TOKENS[1])
            warm_up.append(document)
            prompts += [document + take(TREE_TOKENS[2] + 7 * i) for i in range(samples)]
    order = np.random.default_rng(0).permutation(len(prompts))
    return warm_up, [prompts[i] for i in order]


def _prompts(tokens: np.ndarray) -> tuple[list[list[int]], list[list[int]]]:
    """A prompt per group to warm the cache; 32 requests in 3 groups and 5 ungrouped, shuffled."""
    take = _source(tokens)
    warm_up, prompts = [], []
    for prefix_tokens, members, own_tokens in GROUPS:
        prefix = take(prefix_tokens)
        warm_up.append(prefix)
        prompts += [prefix + take(own_tokens + i) for i in range(members)]
    prompts += [take(60 + 50 * i) for i in range(UNGROUPED)]
    order = np.random.default_rng(0).permutation(len(prompts))
    return warm_up, [prompts[i] for i in order]


def random_tokens(_: Path) -> np.ndarray:
    return np.random.default_rng(1).integers(3, VOCABULARY, size=20_000)


def text_tokens(model: Path) -> np.ndarray:
    from transformers import AutoTokenizer

    text = (Path(__file__).parents[2] / "benchmarks" / "harness" / "text" / "gpl-3.txt").read_text()
    ids = AutoTokenizer.from_pretrained(model)(text)["input_ids"]
    return np.array(ids * 3)


def distances(result: dict[str, Any], reference: dict[str, Any]) -> np.ndarray:
    """Differences in log-probability over all steps taken: root mean square and 99.9th percentile.

    A run with a planted error takes fewer of them.
    """
    steps = len(result["tokens"][0])
    assert result["tokens"] == [tokens[:steps] for tokens in reference["tokens"]]
    theirs = np.array(reference["logprobs"])[:, :steps]
    difference = np.abs(np.array(result["logprobs"]) - theirs)
    return np.array([np.sqrt((difference**2).mean()), np.quantile(difference, 0.999)])


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its prompts, and the errors to plant.

    Attributes:
        write: writes the model into a folder, and returns where it is. tokens: of the model, to
            make prompts of. tree: prompts of a tree, else three groups. steps: tokens to produce.
        blocks: of the KV cache. Pages of memory that no request needs take seconds, too.
        bf16, fp32: planted in the runs of this dtype.
    """

    write: Callable[[Path], Path]
    tokens: Callable[[Path], np.ndarray] = random_tokens
    tree: bool = False
    steps: int = STEPS
    blocks: int = 320
    bf16: Sequence[str] = ("block", "layout")
    fp32: Sequence[str] = ("lse", "context-lse")


# fp32 is 2 ** 16 times finer than bf16. A hundredth of the bf16 bound leaves room for all that is
# not rounding of the model itself, and lies far below what any planted error does.
FP32_SHARE = 0.01


def check(case: Case, tmp_path: Path) -> None:
    """Assert that the case holds, and that its planted errors are seen."""
    model = case.write(tmp_path / "model")
    warm_up, prompts = (_tree if case.tree else _prompts)(case.tokens(model))
    force = None

    def run(dtype: str, plants: Sequence[str] = (), **engine: Any) -> dict[str, Any]:
        settings = {
            "model": str(model),
            "skip_tokenizer_init": True,
            "max_model_len": 2048,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 1024,
            "block_size": BLOCK,
            "num_gpu_blocks_override": case.blocks,
            "dtype": dtype,
            **engine,
        }
        passes = [(None, case.steps), *((plant, STEPS_PLANTED) for plant in plants)]
        spec = {"warm_up": warm_up, "prompts": prompts, "passes": passes, "force": force}
        return run_engine(tmp_path, {**spec, "engine": settings})

    relay = {
        "attention_backend": "relay",
        "additional_config": {"relay": {"min_saved_tokens": 0}},
    }
    exact = run("float32")["passes"][0]
    force = exact["tokens"]
    stock = run("bfloat16")
    assert stock["counters"]["steps"] == 0
    bound = 2 * distances(stock["passes"][0], exact)

    levels, groups = (2, 8) if case.tree else (1, 3)
    for dtype, plants, share in (
        ("bfloat16", case.bf16, 1.0),
        ("float32", case.fp32, FP32_SHARE),
    ):
        result = run(dtype, plants, **relay)
        assert "stay on vLLM's own" not in result["log"]
        assert result["counters"]["fallbacks"] == 0
        steps = case.steps - 8 + len(plants) * (STEPS_PLANTED - 8)
        assert result["counters"]["steps_relayed"] >= steps
        assert result["counters"]["groups"] >= groups * steps
        assert result["levels"].get(str(levels), 0) >= steps
        good, *planted = (distances(p, exact) / share for p in result["passes"])
        print(f"{dtype} (rms, p99.9) / share: bound {bound} {good} {planted}")
        assert (good <= bound).all()
        for plant, found in zip(plants, planted, strict=True):
            assert (found > bound).any(), f"the comparison does not see the error {plant!r}"
