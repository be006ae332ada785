import pytest

from vllm_relay.config import RelayConfig


def test_defaults_are_valid_and_come_from_an_empty_additional_config() -> None:
    assert RelayConfig.from_additional_config({}) == RelayConfig()
    assert RelayConfig.from_additional_config({"other": 1}) == RelayConfig()


def test_values_are_taken_over() -> None:
    config = RelayConfig.from_additional_config({"relay": {"max_copy_gib": 1, "enabled": False}})
    assert config == RelayConfig(enabled=False, max_copy_gib=1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"min_saved_token": 1}, "unknown relay setting min_saved_token; known: enabled, "),
        ({"min_saved_tokens": -1}, "relay.min_saved_tokens must be a whole number >= 0, got -1"),
        ({"min_saved_tokens": 1.5}, "relay.min_saved_tokens must be a whole number"),
        ({"max_copy_gib": "2"}, "relay.max_copy_gib must be a number >= 0, got '2'"),
        ({"max_copy_gib": float("nan")}, "relay.max_copy_gib must be a number >= 0, got nan"),
        ({"enabled": 1}, "relay.enabled must be true or false, got 1"),
        ([], r"additional_config\['relay'\] must be a mapping"),
    ],
)
def test_bad_settings_are_named(given: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RelayConfig.from_additional_config({"relay": given})
