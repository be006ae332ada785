"""Digests change with everything that KV depends on, and with nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_relay.system_kv.digest import (
    TOKENIZER_FILES,
    default_chat_template,
    digest_chat_template,
    digest_tokenizer,
    digest_weights,
)

SHARDS = {
    "model-00001-of-00002.safetensors": bytes(range(256)) * 5,
    "model-00002-of-00002.safetensors": b"\xff" * 777,
}
TOKENIZER = {
    "tokenizer.json": '{"model": {"vocab": {"a": 0, "b": 1}, "merges": ["a b"]}}',
    "special_tokens_map.json": '{"eos_token": "</s>"}',
    "tokenizer_config.json": '{"add_bos_token": true, "chat_template": "{{ messages }}"}',
}


def folder_of(folder: Path, files: dict[str, bytes] | dict[str, str]) -> Path:
    """Make a folder with these files, in this order."""
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


# Weights


def test_weights_have_one_digest_wherever_they_lie_and_whenever_they_came(tmp_path: Path) -> None:
    one = folder_of(tmp_path / "one", SHARDS)
    other = folder_of(tmp_path / "other", dict(reversed(SHARDS.items())))
    links = folder_of(tmp_path / "links", {})  # as in Hugging Face's cache
    for i, name in enumerate(SHARDS):
        blob = tmp_path / f"blob{i}"
        blob.write_bytes(SHARDS[name])
        (links / name).symlink_to(blob)
    digest = digest_weights(one)
    assert len(digest) == 64 and int(digest, 16)
    assert digest == digest_weights(other) == digest_weights(links)


def test_the_order_in_which_a_folder_lists_its_files_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path / "model", SHARDS)
    digest = digest_weights(folder)
    # Forced: a file system may list them in the same order however they came.
    listed = {order: sorted(folder.iterdir(), reverse=order) for order in (False, True)}
    for order in listed:
        monkeypatch.setattr(Path, "glob", lambda self, pattern, order=order: iter(listed[order]))
        assert digest_weights(folder) == digest


def test_files_that_are_no_weights_do_not_count(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", SHARDS)
    digest = digest_weights(folder)
    # The engine does not read *.bin when there is *.safetensors.
    for name in ("config.json", "model.safetensors.index.json", "pytorch_model.bin", "README.md"):
        (folder / name).write_text("{}")
    assert digest_weights(folder) == digest


def test_any_change_of_the_weights_changes_their_digest(tmp_path: Path) -> None:
    first, second = SHARDS
    one, two = SHARDS.values()
    changed = {
        "as they are": SHARDS,
        "first byte": {first: bytes([one[0] ^ 1]) + one[1:], second: two},
        "last byte": {first: one, second: two[:-1] + b"\0"},
        "one byte less": {first: one, second: two[:-1]},
        "renamed": {first: one, "model-00003-of-00003.safetensors": two},
        "swapped": {first: two, second: one},
        "moved border": {first: one + two[:1], second: two[1:]},
        "only one": {first: one},
        "joined": {first: one + two},
        "an empty one more": {**SHARDS, "zero.safetensors": b""},
    }
    digests = {digest_weights(folder_of(tmp_path / name, files)) for name, files in changed.items()}
    assert len(digests) == len(changed)


def test_one_changed_byte_is_seen_in_a_file_of_many_megabytes(tmp_path: Path) -> None:
    # so large that it is read on several threads
    folder = folder_of(tmp_path / "model", {"model.safetensors": bytes(16 << 20)})
    digest = digest_weights(folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(11_111_111)
        file.write(b"\1")
    assert digest_weights(folder) != digest


@pytest.mark.parametrize("suffix", ["safetensors", "bin", "pt", "gguf"])
def test_every_kind_of_weights_is_found(tmp_path: Path, suffix: str) -> None:
    one = folder_of(tmp_path / "one", {f"model.{suffix}": b"1"})
    two = folder_of(tmp_path / "two", {f"model.{suffix}": b"2"})
    assert digest_weights(one) != digest_weights(two)


def test_a_model_may_be_one_file(tmp_path: Path) -> None:
    file = tmp_path / "model-Q8_0.gguf"
    file.write_bytes(b"GGUF and so on")
    digest = digest_weights(file)
    (tmp_path / "other.gguf").write_bytes(b"its neighbour does not count")
    assert digest_weights(file) == digest
    file.write_bytes(b"GGUF and so forth")
    assert digest_weights(file) != digest


@pytest.mark.parametrize("files", [{}, {"config.json": "{}", "model.safetensors.tmp": "x"}])
def test_a_model_without_weights_is_named(tmp_path: Path, files: dict[str, str]) -> None:
    folder = folder_of(tmp_path / "model", files)
    with pytest.raises(FileNotFoundError, match=rf"^{folder}: no weight files \(\*.safetensors, "):
        digest_weights(folder)


# Tokenizer


def test_every_byte_of_tokenizer_json_counts(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", TOKENIZER)
    content = (folder / "tokenizer.json").read_bytes()
    digests = {digest_tokenizer(folder)}
    for at in range(len(content)):
        changed = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        (folder / "tokenizer.json").write_bytes(changed)
        digests.add(digest_tokenizer(folder))
    (folder / "tokenizer.json").write_bytes(content + b"\n")
    digests.add(digest_tokenizer(folder))
    assert len(digests) == len(content) + 2


@pytest.mark.parametrize("name", TOKENIZER_FILES)
def test_every_file_of_a_tokenizer_counts(tmp_path: Path, name: str) -> None:
    without = {other: text for other, text in TOKENIZER.items() if other != name}
    folder = folder_of(tmp_path / "model", without)
    digests = {digest_tokenizer(folder)}
    for text in ('{"a": 0}', '{"a": 1}'):
        (folder / name).write_text(text)
        digests.add(digest_tokenizer(folder))
    assert len(digests) == 3


def test_content_does_not_move_unseen_from_file_to_file(tmp_path: Path) -> None:
    one = folder_of(tmp_path / "one", {"vocab.txt": "a", "merges.txt": "b"})
    two = folder_of(tmp_path / "two", {"vocab.txt": "b", "merges.txt": "a"})
    three = folder_of(tmp_path / "three", {"vocab.txt": "ab", "merges.txt": ""})
    assert len({digest_tokenizer(folder) for folder in (one, two, three)}) == 3


@pytest.mark.parametrize(
    ("config", "same"),
    [
        ({"add_bos_token": True}, True),
        ({"add_bos_token": True, "chat_template": "another"}, True),
        ({"chat_template": [{"name": "default", "template": "x"}], "add_bos_token": True}, True),
        ({"add_bos_token": True, "name_or_path": "/tmp/x", "model_max_length": 7}, True),
        ({"add_bos_token": False}, False),
        ({"add_bos_token": True, "clean_up_tokenization_spaces": True}, False),
        ({}, False),
    ],
)
def test_of_the_tokenizers_settings_the_chat_template_does_not_count(
    tmp_path: Path, config: dict[str, Any], same: bool
) -> None:
    folder = folder_of(tmp_path / "model", TOKENIZER)
    digest = digest_tokenizer(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert digest_tokenizer(folder) == digest
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=4))
    assert (digest_tokenizer(folder) == digest) is same


def test_a_folder_without_a_tokenizer_has_no_digest(tmp_path: Path) -> None:
    assert digest_tokenizer(folder_of(tmp_path / "model", {"config.json": "{}"})) is None


# Chat template


def test_a_template_of_its_own_file_comes_before_that_of_the_configuration(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", TOKENIZER)
    assert default_chat_template(folder) == "{{ messages }}"
    (folder / "chat_template.jinja").write_text("{{ 'é' }}\n", encoding="utf-8")
    assert default_chat_template(folder) == "{{ 'é' }}\n"


@pytest.mark.parametrize(
    ("config", "template"),
    [
        ({"chat_template": "one"}, "one"),
        (
            {
                "chat_template": [
                    {"name": "tool_use", "template": "two"},
                    {"name": "default", "template": "one"},
                ]
            },
            "one",
        ),
        ({"chat_template": [{"name": "tool_use", "template": "two"}]}, None),
        ({"chat_template": None}, None),
        ({}, None),
    ],
)
def test_the_template_of_the_configuration_is_one_text_or_several_by_name(
    tmp_path: Path, config: dict[str, Any], template: str | None
) -> None:
    folder = folder_of(tmp_path / "model", {"tokenizer_config.json": json.dumps(config)})
    assert default_chat_template(folder) == template


def test_a_folder_without_a_template_has_none(tmp_path: Path) -> None:
    assert default_chat_template(folder_of(tmp_path / "model", {})) is None


def test_white_space_counts_within_a_template_not_around_it() -> None:
    digest = digest_chat_template("{{ a }} {{ b }}")
    assert digest == digest_chat_template("\n{{ a }} {{ b }}\n\n")
    assert digest != digest_chat_template("{{ a }}  {{ b }}")
    assert digest != digest_chat_template("{{ a }}\n{{ b }}")
    assert len(digest) == 64
