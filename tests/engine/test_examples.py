"""The examples for vLLM, on one engine: each is relayed, and returns its answers."""

import shutil
from typing import Any

import pytest
from transformers import LlamaConfig

from benchmarks.harness.random_model import write_model
from tests.engine.engine import SMOLLM2, run_engine

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TEXT = "A shared text has to fill some KV blocks before it is read once for all. "
# Prompts of two tenants, mixed.
TENANTS = [f"{tenant}: {8 * TEXT}Request {97 * i}." for i in range(4) for tenant in "AB"]
RUNS: list[tuple[str, dict[str, Any]]] = [
    ("chat_service", {"system_prompt": 8 * TEXT, "users": 4, "tokens": 4}),
    ("document_questions", {"documents": [8 * TEXT, 8 * TEXT.upper()], "tokens": 4}),
    ("grpo_rollouts", {"examples": 6, "samples": 3, "tokens": 4}),
    ("agents", {"tokens": 4}),
    ("tenants_batch", {"prompts": TENANTS, "tokens": 4}),
    ("tenants_batch", {"prompts": TENANTS[::-1], "tokens": 4}),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of `RUNS`: two layers of random weights, SmolLM2's tokenizer and template."""
    folder = tmp_path_factory.mktemp("examples")
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    model = write_model(folder / "model", config, 3)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(SMOLLM2 / name, model)
    engine = {
        "model": str(model),
        "dtype": "float32",
        "max_num_seqs": 16,
        "block_size": 32,
        "enforce_eager": True,
        "attention_backend": "relay",
        "additional_config": {"relay": {"min_saved_tokens": 0}},
    }
    results = run_engine(folder, {"engine": engine, "runs": RUNS}, "run_examples.py")["runs"]
    return results


def test_every_example_is_relayed(runs: list[dict[str, Any]]) -> None:
    for (name, _), found in zip(RUNS, runs, strict=True):
        assert found["counters"]["steps_relayed"] >= 3, name
        assert found["counters"]["fallbacks"] == 0, name


def test_users_share_the_system_prompt_in_every_turn(runs: list[dict[str, Any]]) -> None:
    chats, counted = runs[0]["returned"], runs[0]["counters"]
    roles = ["system", *["user", "assistant"] * 2]
    assert [[message["role"] for message in chat] for chat in chats] == [roles] * 4
    assert counted["tokens_shared"] >= 2 * 3 * 96


def test_documents_are_groups_side_by_side(runs: list[dict[str, Any]]) -> None:
    answers, counted = runs[1]["returned"], runs[1]["counters"]
    assert [len(texts) for texts in answers] == [8, 8]
    assert counted["groups"] >= 2 * counted["steps_relayed"]


def test_samples_are_those_of_their_problem_and_share_the_examples(
    runs: list[dict[str, Any]],
) -> None:
    problems, counted = runs[2]["returned"], runs[2]["counters"]
    assert [len(samples) for samples in problems] == [3] * 4
    assert len({text for samples in problems for text, _ in samples}) > 4
    assert all(abs(sum(advantage for _, advantage in s)) < 1e-9 for s in problems)
    assert counted["requests"] >= 12 * 3


def test_agents_share_a_tree(runs: list[dict[str, Any]]) -> None:
    answers, counted = runs[3]["returned"], runs[3]["counters"]
    assert [len(texts) for texts in answers.values()] == [4] * 4
    # The tools of all and a role of each.
    assert counted["groups"] >= 5 * 3


def test_answers_of_a_batch_come_in_the_order_of_its_requests(runs: list[dict[str, Any]]) -> None:
    given, reversed_ = runs[4]["returned"], runs[5]["returned"]
    assert len(set(given)) > 2
    assert reversed_ == given[::-1]
