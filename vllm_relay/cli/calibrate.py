"""``vllm-relay calibrate``: the cost model's constants, measured on this machine."""

import json
import os
import re
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from vllm_relay.cli.console import PLAIN, JsonFlag, err, one_line_errors, out
from vllm_relay.cli.engine import errors_of_the_engine, read_engine_args
from vllm_relay.lifetime import ended_in_order

if TYPE_CHECKING:
    from vllm_relay.sharing.cost_store import Constants

# GiB of the KV cache of the engine, which wants room for a request of the model's length.
KV_SPACE = "4"


def calibrate(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Option(help="As for vllm serve; weights are not read.")
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(metavar="HEADS/KV_HEADS/SIZE", help="In place of a model, such as 32/8/128."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Default: the file that the backend reads."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure the cost of attention on this machine.

    Relay predicts from it which groups pay. On a CPU a server measures for itself at its first
    start, in a few seconds; this takes a minute and more steps. Starts the engine with the model's
    layers, times its kernels (on a GPU whole layers in CUDA graphs), and keeps the constants per
    device, threads and head shape. Any other option is vLLM's: give those that you serve with.
    """
    from vllm_relay.sharing.cost_store import Constants, check_writable, save, user_file
    from vllm_relay.validation import checked

    with one_line_errors(), ended_in_order(), ExitStack() as stack:
        if (model is None) == (shape is None):
            raise ValueError("give --model or --shape")
        path = user_file() if output is None else output
        check_writable(path)
        if shape is not None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="vllm-relay-"))
            model = _write_config(Path(folder), shape)
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", KV_SPACE)
        arguments = read_engine_args("calibrate", str(model), context.args)
        with errors_of_the_engine(arguments):
            measured = _measure(arguments)
        found = checked(list[Constants], [each["constants"] for each in measured], "measured ")
        save(found, path)
    if as_json:
        out.print_json(data={"path": str(path), "measured": measured})
        return
    for constants, each in zip(found, measured, strict=True):
        Console(**PLAIN).print(_table(constants, each["errors"]))
    out.print(f"kept in {path}")


def _write_config(folder: Path, shape: str) -> str:
    """A model of four layers with these heads, without weights; returns its folder."""
    if not re.fullmatch("/".join(["0*[1-9][0-9]*"] * 3), shape):
        raise ValueError(f"--shape: expected HEADS/KV_HEADS/SIZE, got {shape!r}")
    heads, kv_heads, size = map(int, shape.split("/"))
    if heads % kv_heads:
        raise ValueError(f"--shape: {heads} heads are no multiple of {kv_heads} KV heads")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 256,
        "hidden_size": heads * size,
        "intermediate_size": 2 * size,
        "num_hidden_layers": 4,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": size,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def _measure(arguments: Any) -> list[dict[str, Any]]:
    from vllm import LLM
    from vllm.platforms import current_platform

    arguments.load_format = "dummy"
    arguments.skip_tokenizer_init = True
    arguments.attention_backend = "relay"
    arguments.additional_config = {"relay": {"min_saved_tokens": 0}}
    where = "worker" if current_platform.is_cpu() else "cuda"
    # On a GPU decodes run in graphs; their schedules differ.
    arguments.enforce_eager = arguments.enforce_eager or current_platform.is_cpu()
    arguments.worker_extension_cls = f"vllm_relay.calibration.{where}.Calibrator"
    err.print("vllm-relay: starting the engine")
    llm = LLM.from_engine_args(arguments)
    err.print("vllm-relay: timing its attention")
    try:
        measured: list[dict[str, Any]] = llm.collective_rpc("measure_attention")[0]
    except Exception as error:  # vLLM raises no other of what a worker raised
        raise RuntimeError(f"attention was not measured: {error}") from error
    return measured


def _table(found: "Constants", errors: dict[str, float]) -> Table:
    from vllm_relay.sharing.gpu import is_gpu

    gpu = is_gpu(found.device)
    device = found.device if gpu else f"{found.device}, {found.threads} threads"
    caption = f"whole {'layers' if gpu else 'steps'} off by {errors['whole']:.0%} (medians)"
    if not gpu:
        caption = (
            f"fusion {_rate(found.fusion, 'GB/s')}; a relayed step {found.step * 1e6:,.0f} µs and "
            f"{found.level * 1e6:,.0f} µs per level; copies {_rate(found.copy, 'GB/s')}; {caption}"
        )
    heads = f"{found.heads}/{found.kv_heads} heads of {found.head_size}, {found.dtype}"
    table = Table(
        "", title=f"{device}, {heads}", title_justify="left", caption=caption,
        caption_justify="left",
    )  # fmt: skip
    for name in ("call", "first reads", "repeated reads", "arithmetic", "off by"):
        table.add_column(name, justify="right")
    titles = {"stock": "vLLM's own", "context": "context", "system": "system"}
    for name, title in (titles if gpu else titles | {"packed": "system, packed"}).items():
        kernel = getattr(found, name)
        table.add_row(
            title,
            f"{kernel.call * 1e6:,.0f} µs",
            _rate(kernel.first, "GB/s"),
            _rate(kernel.read, "GB/s"),
            _rate(kernel.pair, "GFLOP/s"),
            f"{errors[name]:.0%}",
        )
    return table


def _rate(seconds: float, unit: str) -> str:
    return f"{1e-9 / seconds:,.1f} {unit}" if seconds else "none"
