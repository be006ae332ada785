"""Parity of architectures whose attention layers differ, a third of those in docs/models.md."""

from pathlib import Path

import pytest

from tests.engine.models import check_model

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.mark.parametrize(
    ("name", "planted"),
    [
        ("gpt-oss", ("window", "sink")),
        ("gemma-2", ("window", "cap")),
        ("gemma-3", ("window",)),
        ("gemma-4", ("window",)),
        ("falcon", ("slope",)),
        ("qwen-3-next", ()),
        ("granite-4", ()),
        ("gemma-3n", ()),
        ("llama-4", ()),
        ("mixtral", ()),
        ("cohere-2", ()),
    ],
)
def test_logprobs_stay_within_twice_the_distance_of_vllms_own(
    name: str, planted: tuple[str, ...], tmp_path: Path
) -> None:
    check_model(name, tmp_path, planted)
