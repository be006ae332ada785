"""``vllm-relay pin``, ``unpin``, ``list``, ``save``: prefixes kept by a running server.

Each is a request of one token to the server's own API, see `vllm_relay.system_kv.pins`.
"""

import re
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from vllm_relay.cli.console import JsonFlag, err, one_line_errors, out
from vllm_relay.cli.system_kv import read_text

Url = Annotated[str, typer.Option(help="URL of the server.")]
ApiKey = Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="API key of the server.")]
LOCAL = "http://localhost:8000"
# User messages of conversations that are compared; they begin with different characters.
_USERS = ("Hello", "0", " a")
# Seconds for an answer: a long prompt is computed first, a round of saving takes some minutes.
_PATIENCE, _SAVE_PATIENCE = 600.0, 1800.0


class _Server:
    """A server's API, and its engines: one, or those of data parallelism."""

    def __init__(self, url: str, api_key: str | None) -> None:
        import requests

        self._url = url.rstrip("/")
        self._http = requests.Session()
        if api_key:
            self._http.headers["Authorization"] = f"Bearer {api_key}"
        self._model = self._call("GET", "/v1/models")["data"][0]["id"]
        metrics = self._http.get(f"{self._url}/metrics", timeout=_PATIENCE)
        found = re.findall(r'vllm:num_requests_running\{engine="(\d+)"', metrics.text)
        if not (metrics.ok and found):
            err.print(
                f"vllm-relay: {self._url}/metrics names no engine: one is asked, of any number"
            )
        self._engines = sorted(set(map(int, found))) or [0]

    def command(self, command: dict[str, Any], **prompt: Any) -> tuple[list[Any], list[str]]:
        """Answers of the engines that carried it out, and errors of the others."""
        found, errors = [], []
        for place, engine in enumerate(self._engines):
            body = {
                "model": self._model,
                "prompt": [0],
                "max_tokens": 1,
                "kv_transfer_params": {"relay": command},
                **prompt,
            }
            # One engine needs no number, and a server in front of it may not know this header.
            headers = {"X-data-parallel-rank": str(place)} if len(self._engines) > 1 else {}
            seconds = _SAVE_PATIENCE if "save" in command else _PATIENCE
            answer = self._call("POST", "/v1/completions", body, headers, seconds)
            relay = (answer.get("kv_transfer_params") or {}).get("relay")
            if relay is None:
                raise ValueError(
                    f"{self._url}: does not pin: start it with "
                    """--additional-config '{"relay": {"system_kv": {"pins": true}}}'"""
                )
            if "error" in relay:
                which = f"engine {engine}: " if len(self._engines) > 1 else ""
                errors.append(f"{self._url}: {which}{relay['error']}")
            else:
                found.append({"engine": engine, **relay})
        return found, errors

    def prefix_of(self, message: str) -> list[int]:
        """The tokens with which all conversations under a system message begin."""
        chats = [
            self._call(
                "POST",
                "/tokenize",
                {
                    "model": self._model,
                    "messages": [
                        {"role": "system", "content": message},
                        {"role": "user", "content": user},
                    ],
                },
            )["tokens"]
            for user in _USERS
        ]
        same = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*chats, strict=False))
        return [tokens[0] for tokens in same]

    def _call(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        seconds: float = _PATIENCE,
    ) -> Any:
        """The JSON answer. Raises ValueError with the server's message."""
        import requests

        where = self._url + path
        try:
            answer = self._http.request(method, where, json=body, headers=headers, timeout=seconds)
            if answer.ok:
                return answer.json()
        except requests.ConnectionError:
            raise ValueError(f"{self._url}: no server answers") from None
        except (requests.RequestException, ValueError) as error:
            raise ValueError(f"{where}: {error}") from None
        try:
            given = answer.json()
            said = given["error"]["message"] if isinstance(given["error"], dict) else given["error"]
        except (ValueError, KeyError, TypeError):
            said = answer.reason
        raise ValueError(f"{where}: {answer.status_code}: {said}")


def pin(
    url: Url = LOCAL,
    system_prompt: Annotated[
        Path | None, typer.Option(help="Text file: the system message of chats.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Text file: the beginning of completion prompts.")
    ] = None,
    api_key: ApiKey = None,
    as_json: JsonFlag = False,
) -> None:
    """Keep the KV of a prompt in the cache of a running server; it is computed if it is new.

    The server needs the setting system_kv.pins. Whole KV blocks are pinned.
    """
    with one_line_errors():
        if (system_prompt is None) == (text is None):
            raise ValueError("give --system-prompt or --text")
        if system_prompt is not None:
            message = read_text(system_prompt)
            server = _Server(url, api_key)
            prompt: Any = server.prefix_of(message)
            if not prompt:
                raise ValueError(f"{system_prompt}: conversations do not begin with it in common")
        elif text is not None:
            prompt = read_text(text)
            server = _Server(url, api_key)
        _show(*server.command({"pin": True}, prompt=prompt), "pinned", as_json)


def unpin(
    label: Annotated[str, typer.Argument(help="As pin and list show it.")],
    url: Url = LOCAL,
    api_key: ApiKey = None,
    as_json: JsonFlag = False,
) -> None:
    """Let a running server evict a pinned prompt again."""
    with one_line_errors():
        _show(*_Server(url, api_key).command({"unpin": label}), "unpinned", as_json)


def list_pins(url: Url = LOCAL, api_key: ApiKey = None, as_json: JsonFlag = False) -> None:
    """Show the prompts that are pinned in a running server, and what requests found of them."""
    with one_line_errors():
        _show(*_Server(url, api_key).command({"list": True}), "pins", as_json)


def save(url: Url = LOCAL, api_key: ApiKey = None, as_json: JsonFlag = False) -> None:
    """Let a running server save pinned and hot prompts now, into its folder system_kv.remember."""
    with one_line_errors():
        found, errors = _Server(url, api_key).command({"save": True})
        if as_json:
            out.print_json(data=found)
        for entry in [] if as_json else found:
            out.print(f"engine {entry['engine']}: {len(entry['saved'])} files")
            for name in entry["saved"]:
                out.print(f"  {name}")
        if errors:
            raise ValueError("; ".join(errors))


def _show(found: list[dict[str, Any]], errors: list[str], key: str, as_json: bool) -> None:
    """Print one row per pin and engine. Raises ValueError with the errors, if there are any."""
    if as_json and (found or not errors):
        out.print_json(data=found)
    elif found:
        out.print(_table(found, key))
    if errors:
        raise ValueError("; ".join(errors))


def _table(found: list[dict[str, Any]], key: str) -> Table | str:
    """One row per pin and engine."""
    table = Table(box=box.SIMPLE, padding=0, show_edge=False)
    for name in ("engine", "label"):
        table.add_column(name)
    for name in ("tokens", "KV blocks", "requests hit", "tokens hit"):
        table.add_column(name, justify="right")
    for answer in found:
        for pin in answer[key] if isinstance(answer[key], list) else [answer[key]]:
            numbers = (pin[name] for name in ("tokens", "blocks", "requests_hit", "tokens_hit"))
            row = (str(answer["engine"]), pin["label"], *(f"{number:,}" for number in numbers))
            table.add_row(*row)
    return table if table.row_count else "nothing is pinned"
