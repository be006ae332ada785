"""What of a model a file is compared with; no engine is started."""

import copy
import json
from dataclasses import asdict, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.engine import SMOLLM2
from tests.unit.system_kv.files import small_manifest, write_small
from vllm_relay.system_kv.digest import digest_chat_template
from vllm_relay.system_kv.file import SystemKVError, SystemKVFile
from vllm_relay.system_kv.identity import _rope, differences, identify, read_chat_template
from vllm_relay.system_kv.manifest import Identity

MANIFEST = small_manifest()


def identity(**changes: Any) -> Identity:
    """That of the engine which wrote `small_manifest`; ``changes`` replace its fields."""
    own = {field.name: getattr(MANIFEST, field.name) for field in fields(Identity)}
    return Identity(**(own | changes))


# Differences


def test_an_engine_like_the_one_that_wrote_a_file_does_not_differ(tmp_path: Path) -> None:
    assert differences(MANIFEST, identity()) == []
    assert differences(SystemKVFile(write_small(tmp_path)).manifest, identity()) == []


@pytest.mark.parametrize(
    ("changes", "phrase"),
    [
        (
            {"weights": "d4" * 32},
            "the model's weights (file a1a1a1a1a1a1, engine d4d4d4d4d4d4)",
        ),
        ({"tokenizer": "d4" * 32}, "the tokenizer (file b2b2b2b2b2b2, engine d4d4d4d4d4d4)"),
        (
            {"chat_template": "d4" * 32},
            "the chat template (file c3c3c3c3c3c3, engine d4d4d4d4d4d4)",
        ),
        (
            {"rope": {"rope_theta": 500000.0, "rope_type": "default"}},
            "RoPE rope_theta (file 10000.0, engine 500000.0)",
        ),
        (
            {"config": MANIFEST.config | {"hidden_act": "gelu"}},
            "the model's hidden_act (file silu, engine gelu)",
        ),
        ({"dtype": "float16"}, "dtype (file bfloat16, engine float16)"),
        ({"kv_cache_dtype": "fp8"}, "KV cache dtype (file auto, engine fp8)"),
        ({"quantization": "awq"}, "quantization (file None, engine awq)"),
    ],
)
def test_every_field_that_differs_has_its_phrase(changes: dict[str, Any], phrase: str) -> None:
    assert differences(MANIFEST, identity(**changes)) == [phrase]


def test_one_digit_of_a_digest_is_enough_wherever_it_is() -> None:
    for field in ("weights", "tokenizer", "chat_template"):
        for at in (0, 12, 63):
            digest = getattr(MANIFEST, field)
            other = digest[:at] + "f" + digest[at + 1 :]
            assert len(differences(MANIFEST, identity(**{field: other}))) == 1


def test_all_differences_are_told_at_once() -> None:
    other = identity(
        weights="d4" * 32,
        tokenizer="d4" * 32,
        chat_template="d4" * 32,
        rope={"rope_theta": 1.0, "rope_type": "yarn", "factor": 2.0},
        config={"hidden_size": 16, "num_hidden_layers": 3, "hidden_act": "silu"},
        dtype="float32",
        kv_cache_dtype="fp8",
        quantization="awq",
    )
    found = differences(MANIFEST, other)
    assert [phrase.split(" (")[0] for phrase in found] == [
        "the model's weights",
        "the tokenizer",
        "the chat template",
        "RoPE factor",
        "RoPE rope_theta",
        "RoPE rope_type",
        "the model's hidden_size",
        "the model's num_hidden_layers",
        "dtype",
        "KV cache dtype",
        "quantization",
    ]


def test_where_the_model_lies_does_not_count() -> None:
    assert differences(MANIFEST, identity(model="/mnt/elsewhere")) == []
    other = replace(MANIFEST, model="hub/name", engine={"vllm": "0.27.1"}, name="other", text=None)
    assert differences(other, identity()) == []


@pytest.mark.parametrize("field", ["tokenizer", "chat_template"])
def test_what_one_side_does_not_have_is_not_compared(field: str) -> None:
    assert differences(MANIFEST, identity(**{field: None})) == []
    assert differences(replace(MANIFEST, **{field: None}), identity()) == []
    assert differences(replace(MANIFEST, **{field: None}), identity(**{field: None})) == []


@pytest.mark.parametrize("engine", [{}, {"transformers": "4.0"}, {"vllm": version("transformers")}])
def test_settings_that_only_another_version_of_the_library_knows_do_not_count(
    engine: dict[str, str],
) -> None:
    more = MANIFEST.config | {"a_new_setting": 1}
    manifest = replace(MANIFEST, engine=engine)
    assert differences(manifest, identity(config=more)) == []
    assert differences(replace(manifest, config=more), identity()) == []
    # but one that is null on one side is known to it
    null = identity(config=MANIFEST.config | {"hidden_act": None})
    assert differences(manifest, null) == ["the model's hidden_act (file silu, engine None)"]


def test_settings_that_only_one_side_knows_count_with_the_same_library() -> None:
    more = MANIFEST.config | {"a_setting": 1}
    manifest = replace(MANIFEST, engine={"transformers": version("transformers")})
    assert differences(manifest, identity()) == []
    assert differences(manifest, identity(config=more)) == [
        "the model's a_setting (file None, engine 1)"
    ]
    assert differences(replace(manifest, config=more), identity()) == [
        "the model's a_setting (file 1, engine None)"
    ]


def test_rope_entries_that_only_one_side_knows_count() -> None:
    more = MANIFEST.rope | {"factor": 4.0}
    assert differences(MANIFEST, identity(rope=more)) == ["RoPE factor (file None, engine 4.0)"]
    assert differences(replace(MANIFEST, rope=more), identity()) == [
        "RoPE factor (file 4.0, engine None)"
    ]


# RoPE


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {}),
        ({"rope_theta": 1e4, "rope_scaling": None}, {"rope_theta": 1e4}),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "factor": None}},
            {"rope_theta": 1e4, "rope_type": "default"},
        ),
        (
            {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "hidden_size": 7},
            {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"rope_type": "default", "mrope_section": [1, 2]}},
            {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [1, 2]},
        ),
    ],
)
def test_rope_is_flat_and_without_what_is_not_set(
    config: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert _rope(config | {"max_position_embeddings": 8192}, 4096) == expected


@pytest.mark.parametrize("spelling", ["rope_type", "type"])
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_lengths_count_for_the_kinds_of_rope_that_depend_on_them(spelling: str, place: str) -> None:
    def lengths(kind: str) -> set[str]:
        config = {place: {spelling: kind, "factor": 2.0}, "max_position_embeddings": 8192}
        found = _rope(config, 4096)
        assert found.pop("factor") == 2.0 and found.pop(spelling) == kind
        assert found.get("max_position_embeddings", 8192) == 8192
        assert found.get("max_model_len", 4096) == 4096
        return set(found)

    assert lengths("default") == set()
    assert lengths("linear") == lengths("yarn") == lengths("llama3") == {"max_position_embeddings"}
    for kind in ("longrope", "su", "dynamic"):
        assert lengths(kind) == {"max_position_embeddings", "max_model_len"}


def test_longrope_differs_between_engines_of_other_lengths() -> None:
    config = {
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.1, 1.2],
            "long_factor": [1.0, 2.0, 4.000000000000001],
            "attention_factor": None,
        },
        "max_position_embeddings": 131072,
    }
    rope = _rope(config, 32768)
    manifest = replace(MANIFEST, rope=json.loads(json.dumps(rope)))
    assert differences(manifest, identity(rope=rope)) == []
    assert differences(manifest, identity(rope=_rope(config, 32769))) == [
        "RoPE max_model_len (file 32768, engine 32769)"
    ]


def test_a_length_counts_where_one_kind_of_layers_depends_on_it() -> None:
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    config = {
        "rope_parameters": {
            "sliding_attention": plain,
            "full_attention": {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 2.0},
        },
        "max_position_embeddings": 4096,
    }
    assert _rope(config, 8192) != _rope(config, 8193)
    config["rope_parameters"] = {"sliding_attention": plain, "full_attention": plain}
    assert _rope(config, 8192) == _rope(config, 8193)


# Of a real engine's configuration


@pytest.fixture(scope="module")
def made() -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(model=str(SMOLLM2), max_model_len=512).create_engine_config()


@pytest.fixture
def config(made: Any) -> Any:
    """A VllmConfig of this test's own."""
    return copy.deepcopy(made)


def test_an_identity_is_the_same_after_it_was_written_and_read(config: Any, tmp_path: Path) -> None:
    # What a config may hold and JSON does not know, or gives back as something else.
    hf = config.model_config.hf_text_config
    hf.rope_parameters = {"rope_type": "yarn", "rope_theta": 1e5, "mrope_section": (16, 8, 8)}
    hf.window_sizes, hf.dtype_of_gates, hf.one_third = (1, (2, 3)), torch.float32, 1 / 3
    hf.by_layer = {0: "full", 1: "sliding"}
    found = identify(config)
    assert found.rope == {
        "rope_type": "yarn",
        "rope_theta": 1e5,
        "mrope_section": [16, 8, 8],
        "max_position_embeddings": 8192,
    }
    assert found.config["window_sizes"] == [1, [2, 3]] and found.config["one_third"] == 1 / 3
    assert found.config["by_layer"] == {"0": "full", "1": "sliding"}
    own = {field.name: getattr(found, field.name) for field in fields(Identity)}
    manifest = SystemKVFile(write_small(tmp_path, **own)).manifest
    assert differences(manifest, found) == []
    hf.window_sizes, hf.by_layer = (1, (2, 4)), {0: "full", 1: "full"}
    assert [phrase.split(" (")[0] for phrase in differences(manifest, identify(config))] == [
        "the model's by_layer",
        "the model's window_sizes",
    ]


def test_a_model_has_one_identity_until_something_of_it_changes(config: Any) -> None:
    found = identify(config)
    assert found == identify(copy.deepcopy(config))
    assert (found.dtype, found.kv_cache_dtype, found.quantization) == ("bfloat16", "auto", None)
    assert found.config["num_hidden_layers"] == 30 and "vocab_size" not in found.config
    assert found.rope == {"rope_type": "default", "rope_theta": 100000}
    assert found.chat_template == digest_chat_template(
        (SMOLLM2 / "chat_template.jinja").read_text()
    )
    given = identify(config, "{{ messages }}")
    assert given == replace(found, chat_template=digest_chat_template("{{ messages }}"))


def test_the_code_of_a_model_counts_if_it_is_run(config: Any, tmp_path: Path) -> None:
    for file in SMOLLM2.iterdir():
        (tmp_path / file.name).symlink_to(file.resolve())
    config.model_config.model = str(tmp_path)
    (tmp_path / "modeling.py").write_text("SCALE = 1\n")
    assert "own code" not in identify(config).config
    config.model_config.trust_remote_code = True
    one = identify(config)
    (tmp_path / "modeling.py").write_text("SCALE = 2\n")
    two = identify(config)
    assert one.config.keys() == two.config.keys()
    assert [key for key in one.config if one.config[key] != two.config[key]] == ["own code"]


def test_without_a_tokenizer_there_is_nothing_of_it_to_compare(config: Any) -> None:
    whole = identify(config)
    config.model_config.skip_tokenizer_init = True
    assert identify(config) == replace(whole, tokenizer=None, chat_template=None)


def test_weights_that_cannot_be_read_are_named(config: Any, tmp_path: Path) -> None:
    config.model_config.model = str(tmp_path)
    with pytest.raises(SystemKVError, match=rf"^the weights cannot .*: {tmp_path}: no weight"):
        identify(config)
    config.load_config.load_format = "dummy"
    with pytest.raises(SystemKVError, match=r"^weights of load format dummy cannot"):
        identify(config)


def test_a_model_that_is_not_on_this_machine_is_named(config: Any) -> None:
    config.model_config.model = "no-such/model"
    with pytest.raises(SystemKVError, match=r"^model no-such/model cannot be read"):
        identify(config)


def test_an_identity_has_the_fields_of_a_manifest() -> None:
    assert asdict(identity()).keys() <= asdict(MANIFEST).keys()


# The chat template that was given


@pytest.mark.parametrize("given", [None, "{{ messages }}", "{% if a %}", "one\ntwo", "a } b"])
def test_a_template_given_as_a_text_is_that_text(given: str | None) -> None:
    assert read_chat_template(given) == given


def test_a_template_given_as_a_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{{ 'é' }}\n\n", encoding="utf-8")
    assert read_chat_template(str(file)) == "{{ 'é' }}\n\n"
    monkeypatch.chdir(tmp_path)
    assert read_chat_template("own.jinja") == "{{ 'é' }}\n\n"


def test_vllms_own_templates_are_known_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "<|im_start|>" in str(read_chat_template("template_chatml.jinja"))
    (tmp_path / "template_chatml.jinja").write_text("a file here comes first")
    assert read_chat_template("template_chatml.jinja") == "a file here comes first"


@pytest.mark.parametrize("given", ["no/such.jinja", "chatml", ""])
def test_a_template_that_is_none_of_them_is_named(given: str) -> None:
    with pytest.raises(SystemKVError, match=f"^chat template {given}: no such file$"):
        read_chat_template(given)


def test_a_templates_file_may_have_braces_in_its_name(tmp_path: Path) -> None:
    file = tmp_path / "{own}.jinja"
    file.write_text("{{ messages }}")
    assert read_chat_template(str(file)) == "{{ messages }}"
