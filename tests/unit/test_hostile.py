"""Hostile inputs are accepted or refused in one line, in a sample of the soak; faults are found.

All of it, 100,000 cases per parser: ``make soak PART=hostile``.
"""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest

from tests.soak.hostile import PARSERS, run
from vllm_relay import validation
from vllm_relay.explain import trace
from vllm_relay.ops import checks
from vllm_relay.sharing import cost_store
from vllm_relay.system_kv import writer

CASES = 1000


@pytest.mark.parametrize("parser", PARSERS)
def test_hostile_inputs_are_accepted_or_refused_in_one_line(parser: str) -> None:
    row = run(parser, range(CASES))
    assert row["failures"] == 0
    assert row["accepted"] > CASES // 20 and row["refused"] > CASES // 5
    assert row["accepted"] + row["refused"] == row["cases"] == CASES


def _any_json(content: bytes, where: str) -> Any:
    return json.loads(content)


def _one_block_further(stock: Callable[..., Any]) -> Callable[..., Any]:
    return lambda block_ids, block_size: stock(block_ids, block_size) + block_size


# A parser, and a fault in it that only hostile inputs find.
FAULTS: dict[str, tuple[str, Callable[[], AbstractContextManager[Any]]]] = {
    "head sizes are not compared": (
        "system-KV files",
        lambda: mock.patch.object(writer, "_check_shape", lambda *given: None),
    ),
    "blocks are written one too far": (
        "system-KV files",
        lambda: mock.patch.object(writer, "_slots", _one_block_further(writer._slots)),
    ),
    "nesting of measured costs has no limit": (
        "costs",
        lambda: mock.patch.object(cost_store, "parse_json", _any_json),
    ),
    "nesting of rows has no limit": (
        "traces",
        lambda: mock.patch.object(trace, "parse_json", _any_json),
    ),
    "names of settings are shown as they are": (
        "settings",
        lambda: mock.patch.object(validation, "one_line", str),
    ),
    "lengths may exceed the block table": (
        "kernels",
        lambda: mock.patch.object(checks, "lengths", lambda name, x, *given: x.tolist()),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_parser_is_found(name: str) -> None:
    parser, fault = FAULTS[name]
    assert run(parser, range(CASES), fault())["failures"]


def test_a_signal_is_a_failure_and_the_next_case_goes_on() -> None:
    row = run("kernels", range(CASES), mock.patch.object(checks, "key_value", lambda *given: None))
    assert 0 < row["failures"] < row["accepted"]
    assert row["accepted"] + row["refused"] + row["failures"] == CASES
