"""``vllm-relay doctor``: whether relay works on this machine, and for a model."""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from typing import Annotated, Any

import typer

from vllm_relay import __version__
from vllm_relay.cli.console import JsonFlag, err, one_line_errors, out
from vllm_relay.cli.engine import ESCAPE, errors_of_the_engine, quiet_logs, read_engine_args
from vllm_relay.lifetime import ended_in_order

# Prefixes for which it is told when sharing pays.
PREFIX_TOKENS = (256, 1024, 4096, 16384)
MOST_REQUESTS = 256


def doctor(
    context: typer.Context,
    model: Annotated[str | None, typer.Argument(help="As for vllm serve.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check this machine, and what relay does for a model.

    Without a model: the engine, the kernels, the costs. With one, the engine starts without
    weights and says of each layer whether relay serves it, or why not. Any other option is vLLM's:
    give those that you serve with.
    """
    with one_line_errors(), ended_in_order():
        if model is not None and model.startswith(("-", ESCAPE)):
            raise ValueError("the model comes first: vllm-relay doctor MODEL, then vLLM's options")
        quiet_logs()
        found: dict[str, Any] = {"environment": dict(_environment())}
        usable = found["environment"]["relay"] == "usable"
        if usable and model is not None:
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
            arguments = read_engine_args("doctor", model, context.args)
            with errors_of_the_engine(arguments):
                found |= _ask_engine(arguments)
    if as_json:
        out.print_json(data=found)
    else:
        for name, value in found["environment"].items():
            out.print(f"{name:12} {value}", soft_wrap=True)
        if "layers" in found:
            _show(found)
    if not usable:
        raise typer.Exit(1)


def _environment() -> Iterator[tuple[str, str]]:
    """Names and values, ``relay`` last: usable, or why not."""
    yield "vllm-relay", __version__
    try:
        from vllm.platforms import current_platform
        from vllm.plugins import load_plugins_by_group
    except ImportError as error:
        yield "relay", f"vLLM cannot be imported: {error}"
        return
    from vllm_relay import plugin
    from vllm_relay.ops.native import library as native
    from vllm_relay.sharing.cost_store import cpu_name, load, user_file

    with suppress(PackageNotFoundError):
        yield "vLLM", version("vllm")
    problem = plugin.install()
    if "relay" not in load_plugins_by_group("vllm.general_plugins"):
        problem = "vLLM does not find the plugin: it is not installed, or VLLM_PLUGINS excludes it"
    if current_platform.is_cpu():
        yield "device", cpu_name()
        kernels = native.library()
        if isinstance(kernels, str):
            problem = problem or f"no CPU kernels: {kernels}"
            yield "kernels", "none"
        else:
            yield "kernels", f"{kernels.isa} (of {', '.join(kernels.isas)})"
    elif current_platform.is_cuda():
        yield "device", str(current_platform.get_device_name())
    else:
        problem = "vLLM runs on neither a CPU nor CUDA here"
    try:
        path = user_file()
        count = len(load(path))
        yield "costs", f"{count} measurements in {path}" if count else "none measured yet"
    except ValueError as error:
        yield "costs", str(error)
    yield "relay", problem or "usable"


def _ask_engine(arguments: Any) -> dict[str, Any]:
    """The layers of the engine, and the content of a system-KV file."""
    from vllm import LLM
    from vllm.platforms import current_platform

    arguments.load_format = "dummy"
    arguments.skip_tokenizer_init = True
    arguments.attention_backend = "relay"
    # Files would be compared with weights; several engines are alike.
    arguments.additional_config.get("relay", {}).pop("system_kv", None)
    arguments.data_parallel_size = 1
    if current_platform.is_cpu():
        arguments.max_model_len = -1  # what fits into a small KV cache
        arguments.enforce_eager = True
    arguments.worker_extension_cls = "vllm_relay.backend.layer_report.LayerReporter"
    err.print("vllm-relay: starting the engine without weights")
    llm = LLM.from_engine_args(arguments)
    try:
        told = llm.collective_rpc("report_layers", args=(PREFIX_TOKENS, MOST_REQUESTS))
        refusals = llm.collective_rpc("refuse_system_kv")
    except Exception as error:  # vLLM raises no other of what a worker raised
        raise RuntimeError(f"the engine's layers were not told: {error}") from error
    # Ranks of one pipeline stage have the same layers.
    layers = list({layer["name"]: layer for rank in told for layer in rank}.values())
    refusal = next(filter(None, refusals), None)
    return {"layers": layers, "system_kv": f"none: {refusal}" if refusal else _system_kv(layers)}


def _system_kv(layers: Sequence[dict[str, Any]]) -> str:
    """The content of a system-KV file of the model."""
    kept = [layer for layer in layers if layer["kv_bytes"]]
    windowed = sum(layer["window"] > 0 for layer in kept)
    return f"KV of {len(kept)} layers" + (f", of {windowed} the last window" if windowed else "")


def _show(found: dict[str, Any]) -> None:
    layers = found["layers"]

    def alike(layer: dict[str, Any]) -> str:
        """A line on a layer, without its name."""
        heads = f", {layer['heads']}/{layer['kv_heads']} heads of {layer['head_size']}"
        line = layer["kind"] + (heads if layer["heads"] else "")
        line += f", window {layer['window']:,}" if layer["window"] else ""
        if layer["reason"] is not None:
            return f"{line}: vLLM's own, {layer['reason']}"
        told = ", ".join(
            f"{least} requests of {prefix:,} tokens"
            for prefix, least in zip(PREFIX_TOKENS, layer["pays_from"], strict=True)
            if least
        )
        return f"{line}: relay; " + (f"sharing pays from {told}" if told else "no group pays")

    for line, run in groupby(map(alike, layers)):
        out.print(f"{len(list(run)):3} x {line}", soft_wrap=True)
    kv = sum(layer["kv_bytes"] for layer in layers)
    relayed = sum(layer["kv_bytes"] for layer in layers if layer["reason"] is None)
    out.print(f"{'KV':12} {kv:,} bytes per token and rank, {relayed:,} in relayed layers")
    out.print(f"{'system KV':12} {found['system_kv']}")
