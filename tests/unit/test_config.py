from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_relay.config import CONNECTOR, RelayConfig, SystemKVConfig, only_system_kv


def test_defaults_are_valid_and_come_from_an_empty_additional_config() -> None:
    assert RelayConfig.from_additional_config({}) == RelayConfig()
    assert RelayConfig.from_additional_config({"other": 1}) == RelayConfig()


def test_values_are_taken_over() -> None:
    config = RelayConfig.from_additional_config({"relay": {"max_copy_gib": 1, "enabled": False}})
    assert config == RelayConfig(enabled=False, max_copy_gib=1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"min_saved_token": 1}, "relay.min_saved_token is unknown; known: enabled, "),
        (
            {"min_saved_tokens": -1},
            "relay.min_saved_tokens must be >= 0, got -1",
        ),
        ({"min_saved_tokens": 1.5}, "relay.min_saved_tokens must be a valid integer, got 1.5"),
        ({"max_copy_gib": "2"}, "relay.max_copy_gib must be a valid number, got '2'"),
        ({"max_copy_gib": float("nan")}, "relay.max_copy_gib must be a finite number, got nan"),
        ({"max_copy_gib": float("inf")}, "relay.max_copy_gib must be a finite number, got inf"),
        ({"enabled": 1}, "relay.enabled must be a valid boolean, got 1"),
        ({"enabled": None}, "relay.enabled must be a valid boolean, got None"),
        ({"overlap": "no"}, "relay.overlap must be a valid boolean, got 'no'"),
        ({"dense": 1}, "relay.dense must be a valid boolean, got 1"),
        ({"max_levels": 0}, "relay.max_levels must be >= 1, got 0"),
        ([], r"additional_config\['relay'\] must be a mapping"),
    ],
)
def test_bad_settings_are_named(given: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RelayConfig.from_additional_config({"relay": given})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("acme.relay", SystemKVConfig(("acme.relay",))),
        (Path("/kv/acme.relay"), SystemKVConfig(("/kv/acme.relay",))),
        (["a.relay", Path("b.relay")], SystemKVConfig(("a.relay", "b.relay"))),
        (("a.relay", "b.relay"), SystemKVConfig(("a.relay", "b.relay"))),
        ([], SystemKVConfig()),
        ({}, SystemKVConfig()),
        ({"files": "acme.relay"}, SystemKVConfig(("acme.relay",), 0.5, "stop")),
        (
            {"files": ["acme.relay"], "budget": 0.25, "errors": "skip"},
            SystemKVConfig(("acme.relay",), 0.25, "skip"),
        ),
        ({"learn": True}, SystemKVConfig(learn=True)),
        (
            {"remember": Path("/kv"), "remember_gib": 2},
            SystemKVConfig(remember="/kv", remember_gib=2.0),
        ),
        ({"budget": 0}, SystemKVConfig(budget=0)),
        ({"budget": 1}, SystemKVConfig(budget=1.0)),
        (SystemKVConfig(("a.relay",)), SystemKVConfig(("a.relay",))),
    ],
)
def test_system_kvs_are_a_path_a_list_or_settings(given: object, expected: SystemKVConfig) -> None:
    config = RelayConfig.from_additional_config({"relay": {"system_kv": given}})
    assert config == RelayConfig(system_kv=expected)
    assert all(type(file) is str for file in config.system_kv.files)
    # as it travels in the connector's extra config
    assert SystemKVConfig.from_mapping(asdict(config.system_kv)) == expected


def test_there_are_no_system_kvs_unless_asked_for() -> None:
    assert RelayConfig().system_kv == SystemKVConfig(files=(), budget=0.5, errors="stop")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"file": "a"},
            "^system_kv.file is unknown; known: files, budget, errors, salts, ",
        ),
        ({"files": ["a"], "b": 1, "a": 1}, "^system_kv.b is unknown; known: "),
        ({"files": 1}, r"^system_kv.files\[0\] must be a valid string, got 1$"),
        ({"files": None}, r"^system_kv.files\[0\] must be a valid string, got None$"),
        (None, r"^system_kv.files\[0\] must be a valid string, got None$"),
        (True, r"^system_kv.files\[0\] must be a valid string, got True$"),
        ("", r"^system_kv.files\[0\] must have at least 1 character, got ''$"),
        (["a.relay", ""], r"^system_kv.files\[1\] must have at least 1 character, got"),
        (["a.relay", 1], r"^system_kv.files\[1\] must be a valid string, got 1$"),
        ([["a.relay"]], r"^system_kv.files\[0\] must be a valid string"),
        ([{"path": "a.relay"}], r"^system_kv.files\[0\] must be a valid string"),
        ({"files": {"a": "b"}}, r"^system_kv.files\[0\] must be a valid string"),
        ({"budget": -0.01}, "^system_kv.budget must be >= 0, got -0.01$"),
        ({"budget": 1.01}, "^system_kv.budget must be less than or equal to 1, got 1.01$"),
        ({"budget": 50}, "^system_kv.budget must be less than or equal to 1, got 50$"),
        ({"budget": float("nan")}, "^system_kv.budget must be a finite number, got nan$"),
        ({"budget": "0.5"}, "^system_kv.budget must be a valid number, got '0.5'$"),
        ({"budget": True}, "^system_kv.budget must be a valid number, got True$"),
        ({"budget": None}, "^system_kv.budget must be a valid number, got None$"),
        ({"learn": 1}, "^system_kv.learn must be a valid boolean, got 1$"),
        ({"learn": "yes"}, "^system_kv.learn must be a valid boolean, got 'yes'$"),
        ({"remember": True}, "^system_kv.remember must be a valid string, got True$"),
        ({"remember": ""}, "^system_kv.remember must have at least 1 character, got ''$"),
        ({"remember_gib": 0}, "^system_kv.remember_gib must be greater than 0, got 0$"),
        ({"remember_gib": "8"}, "^system_kv.remember_gib must be a valid number, got '8'$"),
        ({"errors": "ignore"}, "^system_kv.errors must be 'stop' or 'skip', got 'ignore'$"),
        ({"errors": None}, "^system_kv.errors must be 'stop' or 'skip', got None$"),
        ({"errors": ["stop"]}, r"^system_kv.errors must be 'stop' or 'skip', got \['stop'\]$"),
    ],
)
def test_bad_settings_of_system_kvs_are_named(given: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RelayConfig.from_additional_config({"relay": {"system_kv": given}})


def test_our_connector_is_told_from_others() -> None:
    assert only_system_kv(None)
    assert only_system_kv(SimpleNamespace(kv_connector=None))
    assert only_system_kv(SimpleNamespace(kv_connector=CONNECTOR))
    assert not only_system_kv(SimpleNamespace(kv_connector="NixlConnector"))
    assert not only_system_kv(SimpleNamespace(kv_connector="MultiConnector"))
