"""A fault is one line of printable text, whatever stands in the file or setting."""

import json
from pathlib import Path

import pytest

from tests.unit.system_kv.files import edit_manifest, refusal, small_manifest, write_small
from vllm_relay.config import RelayConfig
from vllm_relay.sharing.cost_store import SHIPPED, find_costs
from vllm_relay.system_kv.file import SystemKVError
from vllm_relay.system_kv.identity import differences


def test_a_setting_with_a_control_character_is_named_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"^relay\.a\\nb is unknown") as caught:
        RelayConfig.from_additional_config({"relay": {"a\nb": 1}})
    assert len(str(caught.value).splitlines()) == 1


def test_a_name_of_a_manifest_with_a_control_character_is_shown_in_one_line(tmp_path: Path) -> None:
    path = write_small(tmp_path)
    edit_manifest(path, engine={"a\nb": "0.32.0"})
    assert r"engine.a\nb" in refusal(path)


def test_a_difference_with_a_control_character_is_shown_in_one_line() -> None:
    theirs, ours = small_manifest(rope={"a\nb": 1}), small_manifest()
    (found, *_) = differences(theirs, ours)
    error = SystemKVError(f"a.relay: differs from this engine in {found}")
    assert len(str(error).splitlines()) == 1


def test_numbers_that_no_float_holds_are_refused(tmp_path: Path) -> None:
    path, entries = tmp_path / "devices.json", json.loads(SHIPPED.read_text())
    entries[0]["heads"] = 10**400
    path.write_text(json.dumps(entries))
    with pytest.raises(ValueError, match=r"\[0\]\.heads must be less than"):
        find_costs(8, 2, 64, files=[path])
