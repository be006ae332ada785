"""Parity of layers with windows, sinks, a soft cap, ALiBi, and several head shapes in one model."""

from pathlib import Path

import pytest

from benchmarks.harness.architectures import ARCHITECTURES, PEAKS
from benchmarks.harness.random_model import PEAK, write_model
from tests.engine.parity import Case, check

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.mark.parametrize(
    ("name", "planted"),
    [
        ("gpt-oss", ("window", "sink")),
        ("gemma-2", ("window", "cap")),
        ("gemma-3", ("window",)),
        ("gemma-4", ("window",)),
        ("falcon", ("slope",)),
    ],
)
def test_logprobs_stay_within_twice_the_distance_of_vllms_own(
    name: str, planted: tuple[str, ...], tmp_path: Path
) -> None:
    case = Case(
        write=lambda folder: write_model(folder, ARCHITECTURES[name](), peak=PEAKS.get(name, PEAK)),
        bf16=("block",),
        fp32=planted,
    )
    check(case, tmp_path)
