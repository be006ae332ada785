"""Parity of Llama's attention; see `parity`."""

from pathlib import Path

import pytest

from benchmarks.harness.random_model import write_random_model
from tests.engine.engine import SMOLLM2
from tests.engine.parity import Case, check, text_tokens

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_a_tree_of_prompts_in_a_model_with_gqa(tmp_path: Path) -> None:
    case = Case(
        write=lambda folder: write_random_model(folder, 8, 2, 96),
        tree=True,
        bf16=("block", "layout", "level"),
    )
    check(case, tmp_path)


def test_three_groups_in_a_real_model(tmp_path: Path) -> None:
    real = Case(
        write=lambda _: SMOLLM2,
        tokens=text_tokens,
        steps=16,
        blocks=120,
        bf16=("block",),
        fp32=("context-lse",),
    )
    check(real, tmp_path)
