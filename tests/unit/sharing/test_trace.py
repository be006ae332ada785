"""Request logs as they come, and how those that cannot be read are refused."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.sharing.traces import row, write
from vllm_relay.explain.trace import Request, read_trace


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log.jsonl"


def read(log: Path, *rows: Any, block_tokens: int | None = 4, **more: Any) -> list[Request]:
    return read_trace(write(log, list(rows)), block_tokens, **more).requests


def refused(log: Path, content: bytes, block_tokens: int | None = 4, **more: Any) -> str:
    """What is wrong, without the name of the file."""
    log.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read_trace(log, block_tokens, **more)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(log))
    return str(caught.value).removeprefix(str(log))


def test_a_row_of_hashes(log: Path) -> None:
    (request,) = read(log, row(10, 3, [7, 8, 9], 1.5))
    assert request == Request(1.5, 10, 3, (1, 2), line=1)


def test_a_last_block_that_is_not_full_does_not_count(log: Path) -> None:
    a, b, c = read(log, row(8, 1, [7, 8]), row(7, 1, [7, 8]), row(7, 1, [7]))
    assert (a.blocks, b.blocks, c.blocks) == ((1, 2), (1,), (1,))


def test_an_id_after_other_blocks_is_another_block(log: Path) -> None:
    a, b, c = read(log, row(8, 1, [1, 2]), row(8, 1, [3, 2]), row(12, 1, [1, 2, 2]))
    assert a.blocks[1] != b.blocks[1]
    assert c.blocks[:2] == a.blocks and c.blocks[2] not in (*a.blocks, *b.blocks)


def test_tokens_make_blocks(log: Path) -> None:
    a, b, c, d = read(
        log,
        {"prompt_token_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9], "output_length": 5, "timestamp": 2},
        {"prompt_token_ids": [1, 2, 3, 4, 5, 6, 7, 9], "max_tokens": 6},
        {"prompt": [0, 2, 3, 4, 5, 6, 7, 8]},
        {"prompt_token_ids": [], "max_tokens": None},
    )
    assert a == Request(2.0, 9, 5, (1, 2), line=1)
    assert (b.blocks[0], b.output_length) == (a.blocks[0], 6)
    assert not {*a.blocks, *b.blocks} & {*c.blocks} and len({*a.blocks, *b.blocks}) == 3
    assert (d.input_length, d.output_length, d.blocks) == (0, 256, ())


def test_text_and_messages_go_through_the_tokenizer(log: Path) -> None:
    messages = [{"role": "user", "content": "abcd"}, {"role": "user", "content": "efgh"}]

    def tokenize(prompt: str | list[Any]) -> list[int]:
        text = prompt if isinstance(prompt, str) else "".join(m["content"] for m in prompt)
        return [ord(letter) for letter in text]

    a, b = read(log, {"prompt": "abcdefg"}, {"messages": messages}, tokenize=tokenize)
    assert (a.blocks, b.blocks) == ((1,), (1, 2))
    assert (a.input_length, a.text, b.text) == (7, "abcdefg", "abcd efgh")


def test_blocks_are_as_large_as_the_rows_suggest(log: Path) -> None:
    hashes, tokens = row(513, 1, [1, 2]), {"prompt_token_ids": list(range(33))}
    assert [len(r.blocks) for r in read(log, hashes, block_tokens=None)] == [1]
    assert [len(r.blocks) for r in read(log, tokens, block_tokens=None)] == [2]
    assert len(read(log, hashes, tokens, block_tokens=512)) == 2
    content = f"{json.dumps(hashes)}\n{json.dumps(tokens)}\n".encode()
    assert refused(log, content, None) == (
        ": some rows hold hash_ids, others tokens: say how many tokens a block has"
    )


def test_empty_lines_are_nothing_but_are_counted(log: Path) -> None:
    log.write_text(f"\n{json.dumps(row(4, 1, [1]))}\n  \n{json.dumps(row(4, 1, [1]))}")
    assert [request.line for request in read_trace(log, 4).requests] == [2, 4]


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_an_empty_file_is_refused(log: Path, content: bytes) -> None:
    assert refused(log, content) == ": is empty"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": ', "is not JSON: Expecting value: line 2 column 1 (char 12)"),
        (b'{"prompt": "\xff"}', "is not UTF-8 text"),
        (b"[1, 2]", "must be an object, one per line"),
        (b"{}", "has none of hash_ids, prompt_token_ids, prompt, messages"),
        (b'{"hash_ids": [1], "output_length": 1}', "input_length is missing"),
        (b'{"hash_ids": [1], "input_length": 4}', "output_length is missing"),
        (b'{"prompt_token_ids": [1, -2]}', "prompt_token_ids[1] must be >= 0, got -2"),
        (b'{"prompt_token_ids": [1, 2.0]}', "prompt_token_ids[1] must be a valid integer, got 2.0"),
        (b'{"prompt": {}}', "prompt must be a valid list, got {}"),
        (b'{"prompt": "a"}', "prompt needs a tokenizer: give --model or --tokenizer, a folder"),
        (b'{"messages": [1]}', "messages[0] must be a valid dictionary, got 1"),
        (b'{"messages": []}', "messages needs a tokenizer: give --model or --tokenizer, a folder"),
        (b'{"prompt": [1], "max_tokens": -1}', "max_tokens must be >= 0, got -1"),
        (
            b'{"prompt": [1], "timestamp": "noon"}',
            "timestamp must be a valid number, got 'noon'",
        ),
        (
            b'{"prompt": [1], "timestamp": NaN}',
            "timestamp must be less than 1000000000000000000, got nan",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_line(log: Path, content: bytes, message: str) -> None:
    good = json.dumps(row(4, 1, [1])).encode()
    assert refused(log, good + b"\n" + content + b"\n") == f":2: {message}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_length": -1}, "input_length must be >= 0, got -1"),
        ({"input_length": True}, "input_length must be a valid integer, got True"),
        ({"output_length": 2.0}, "output_length must be a valid integer, got 2.0"),
        ({"hash_ids": 7}, "hash_ids must be a valid list, got 7"),
        ({"hash_ids": [1, "2"]}, "hash_ids[1] must be a valid integer, got '2'"),
        ({"hash_ids": [1, 2.0]}, "hash_ids[1] must be a valid integer, got 2.0"),
        ({"hash_ids": [1]}, "1 hash_ids for 8 tokens of input; blocks of 4 tokens make 2"),
        ({"hash_ids": [1] * 3}, "3 hash_ids for 8 tokens of input; blocks of 4 tokens make 2"),
        ({"output_length": 2**31}, "8 + 2147483648 tokens are too many for one request"),
    ],
)
def test_a_row_of_hashes_must_make_sense(log: Path, change: dict[str, Any], message: str) -> None:
    content = json.dumps(row(8, 1, [1, 2]) | change).encode()
    assert refused(log, content) == f":1: {message}"


def test_a_tokenizer_that_fails_is_named_with_the_line(log: Path) -> None:
    def tokenize(prompt: str | list[Any]) -> list[int]:
        raise KeyError("role")

    content = b'{"messages": [{}]}'
    message = refused(log, content, tokenize=tokenize)
    assert message == ":1: the tokenizer refuses messages: 'role'"


def test_a_batch_file(log: Path) -> None:
    body = {"model": "m", "prompt": [1, 2, 3, 4], "max_completion_tokens": 7}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    assert read(log, line) == [Request(0.0, 4, 7, (1,), line=1)]
    assert refused(log, b'{"body": {"input": "x"}}').startswith(":1: has none of hash_ids")


def test_the_log_of_a_server(log: Path) -> None:
    """Lines as vLLM's own class and format write them, among others."""
    script = """
from vllm import SamplingParams
from vllm.entrypoints.serve.utils.request_logger import RequestLogger
from vllm.logger import _configure_vllm_root_logger
_configure_vllm_root_logger()
logger = RequestLogger(max_log_len=None)
for name, prompt, ids in (
    ("cmpl-1", "a\\nb, prompt_token_ids: [9], ", [1, 2, 3, 4, 5]),
    ("cmpl-2", None, [1, 2, 3, 4]),
    ("cmpl-3", None, None),
):
    logger.log_inputs(name, prompt, ids, None, SamplingParams(max_tokens=8), None)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"VLLM_LOGGING_LEVEL": "DEBUG"},
        capture_output=True,
        text=True,
        check=True,
    )
    log.write_text(done.stdout + done.stderr)
    first, second = read_trace(log, 4).requests
    assert (first.input_length, first.output_length, first.blocks) == (5, 8, (1,))
    assert (second.input_length, second.output_length, second.blocks) == (4, 8, (1,))
    assert 0 <= second.timestamp - first.timestamp <= 60_000 and second.line > first.line


def test_a_servers_log_without_prompts_says_what_would_log_them(log: Path) -> None:
    line = b"(APIServer pid=7) INFO 11-26 22:33:57 [request_logger.py:61] Received request a: "
    line += b"params: SamplingParams(n=1, max_tokens=8), lora_request: None.\n"
    assert "VLLM_LOGGING_LEVEL=DEBUG" in refused(log, line)
    assert "neither JSON lines nor" in refused(log, b"INFO 11-26 22:33:57 [api.py:1] Started.\n")
