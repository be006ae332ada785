"""Commands of a comparison: `vllm bench serve` as the client, `vllm-relay build` for system KV."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_relay.serving.processes import Report, Server, beside_python, run


def bench_serve(
    server: Server, options: dict[str, Any], report: Report = lambda doing: None
) -> dict[str, Any]:
    """Runs `vllm bench serve --<name> <value> ...` against a server; returns its result JSON.

    Options that are True have no value. The tokenizer defaults to the model's. Result and log of
    the client lie beside the server's log. RuntimeError if the client or requests failed.
    """
    result = server.log.with_name(f"{server.log.stem}-bench.json")
    fixed = {
        "base-url": server.url,
        "model": server.name,
        "tokenizer": server.model,
        "result-dir": result.parent,
        "result-filename": result.name,
    }
    result.unlink(missing_ok=True)  # of the previous run
    command = beside_python("vllm", "bench", "serve", "--ignore-eos", "--save-result")
    for name, value in {**fixed, **options}.items():
        command += [f"--{name}"] if value is True else [f"--{name}", str(value)]

    def progress(text: str) -> str:
        counts = re.findall(r"(\d+)/(\d+) \[", text.partition("Starting main")[2])
        return "{} of {} requests".format(*counts[-1]) if counts else "preparing"

    log = result.with_suffix(".log")
    # Prompts of a timed trace are seeded by `hash`: the same ones for every system.
    run(command, log, {"PYTHONHASHSEED": "0"}, progress=progress, report=report)
    measured: dict[str, Any] = json.loads(result.read_text())
    if measured["failed"]:
        lines = next((x for x in measured.get("errors", []) if x), "").strip().splitlines()
        why = lines[-1] if lines else f"see {log}"
        raise RuntimeError(f"{measured['failed']} bench requests failed: {why}")
    return measured


def build_system_kv(
    model: Path | str,
    output: Path,
    options: Sequence[str],
    *,
    env: dict[str, str] | None = None,
    report: Report = lambda doing: None,
) -> Path:
    """Runs `vllm-relay build` with these options; returns ``output``, a file or a folder."""
    command = beside_python("vllm-relay", "build", "--model", str(model), "-o", str(output))

    def progress(text: str) -> str:
        return (re.findall(r"^vllm-relay: (.+)$", text, re.MULTILINE) or ["importing vLLM"])[-1]

    log = (output if output.is_dir() else output.parent) / "system-kv-build.log"
    run([*command, *options], log, env, progress=progress, report=report)
    return output
