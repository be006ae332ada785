"""Relay is no further from an fp32 run than twice the distance of vLLM's own bf16 run.

All runs produce the same tokens (those that the fp32 run chose), so log-probabilities are compared
position by position. The same comparison must fail with an error planted in the relay path, or it
would prove nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.random_model import VOCABULARY
from tests.engine.engine import run_engine
from tests.engine.reference_run import run_reference

STEPS = 32
# With a planted error: it shows at once.
STEPS_PLANTED = 16
BLOCK = 128
# tokens of each group's shared prefix, its members, and tokens that each member adds
GROUPS = ((600, 14, 60), (420, 10, 60), (300, 8, 90))
# tokens of each ungrouped request
UNGROUPED = (60, 110, 160, 210, 260)
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


def _prompts(
    tokens: np.ndarray, groups: Sequence[tuple[int, int, int]], ungrouped: Sequence[int]
) -> tuple[list[list[int]], list[list[int]]]:
    """A prompt per group to warm the cache; the requests of the groups and ungrouped, shuffled."""
    take = _source(tokens)
    warm_up, prompts = [], []
    for prefix_tokens, members, own_tokens in groups:
        prefix = take(prefix_tokens)
        warm_up.append(prefix)
        prompts += [prefix + take(own_tokens + i) for i in range(members)]
    prompts += [take(count) for count in ungrouped]
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
            make prompts of. tree: prompts of a tree, else groups and ungrouped requests: tokens of
            a prefix, members, tokens of their own. steps: tokens to produce.
        blocks: of the KV cache. Pages of memory that no request needs take seconds, too.
        engine: further arguments of `vllm.LLM`. float32: False if the engine has the model in bf16
            only; transformers computes the fp32 run then, of the tokens that vLLM's own run chose.
        relayed: layers that relay serves; None: all.
        bf16, fp32: planted in the runs of this dtype.
    """

    write: Callable[[Path], Path]
    tokens: Callable[[Path], np.ndarray] = random_tokens
    tree: bool = False
    groups: Sequence[tuple[int, int, int]] = GROUPS
    ungrouped: Sequence[int] = UNGROUPED
    steps: int = STEPS
    blocks: int = 320
    engine: Mapping[str, Any] = field(default_factory=dict)
    float32: bool = True
    relayed: int | None = None
    bf16: Sequence[str] = ("block", "layout")
    fp32: Sequence[str] = ("lse", "context-lse")


@dataclass(frozen=True, kw_only=True)
class Found:
    """Distances of relay's runs from the fp32 run, and the layers that relay served.

    Attributes:
        bf16: largest of the distances over those of vLLM's own bf16 run. fp32: the same of relay's
            fp32 run, None without one. layers: `vllm_relay.backend.layer_report.Layer` as data.
    """

    bf16: float
    fp32: float | None
    layers: list[dict[str, Any]]


# fp32 is 2 ** 16 times finer than bf16. A hundredth of the bf16 bound leaves room for all that is
# not rounding of the model itself, and lies far below what any planted error does.
FP32_SHARE = 0.01
RELAY = {
    "attention_backend": "relay",
    "additional_config": {"relay": {"min_saved_tokens": 0}},
}


def check(case: Case, tmp_path: Path) -> Found:
    """Assert that the case holds, and that its planted errors are seen."""
    model = case.write(tmp_path / "model")
    tokens = case.tokens(model)
    warm_up, prompts = _tree(tokens) if case.tree else _prompts(tokens, case.groups, case.ungrouped)
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
            **case.engine,
            **engine,
        }
        passes = [(None, case.steps), *((plant, STEPS_PLANTED) for plant in plants)]
        spec = {"warm_up": warm_up, "prompts": prompts, "passes": passes, "force": force}
        return run_engine(tmp_path, {**spec, "engine": settings})

    first = run("float32" if case.float32 else "bfloat16")
    force = first["passes"][0]["tokens"]
    if case.float32:
        exact, stock = first["passes"][0], run("bfloat16")
    else:
        exact, stock = run_reference(tmp_path, model, prompts, force), first
    assert stock["counters"]["steps"] == 0
    own = distances(stock["passes"][0], exact)

    levels, groups = (2, 8) if case.tree else (1, len(case.groups))
    found: dict[str, float] = {}
    runs = [("bfloat16", case.bf16, 1.0), ("float32", case.fp32, FP32_SHARE)]
    for dtype, plants, share in runs[: 1 + case.float32]:
        result = run(dtype, plants, **RELAY)
        assert result["counters"]["fallbacks"] == 0
        layers = result["layers"]
        served = sum(layer["reason"] is None for layer in layers)
        assert served == (len(layers) if case.relayed is None else case.relayed)
        assert case.relayed is not None or "stay on vLLM's own" not in result["log"]
        steps = case.steps - 8 + len(plants) * (STEPS_PLANTED - 8)
        if served:
            assert result["counters"]["steps_relayed"] >= steps
            assert result["counters"]["groups"] >= groups * steps
            assert result["levels"].get(str(levels), 0) >= steps
        else:
            assert result["counters"]["steps_relayed"] == 0
        good, *planted = (distances(p, exact) / own for p in result["passes"])
        print(f"{dtype} (rms, p99.9) over those of vLLM's bf16: {good} {planted}")
        assert (good <= 2 * share).all()
        for plant, wrong in zip(plants, planted, strict=True):
            assert (wrong > 2 * share).any(), f"the comparison does not see the error {plant!r}"
        found[dtype] = float(good.max())
    return Found(bf16=found["bfloat16"], fp32=found.get("float32"), layers=layers)
