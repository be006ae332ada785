"""``vllm-relay explain``: a request log replayed, with its shared KV reads and their gain."""

import importlib.util
import io
import json
from contextlib import ExitStack
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from vllm_relay.cli.console import PLAIN, JsonFlag, one_line_errors, out, progress

if TYPE_CHECKING:
    from vllm_relay.explain.trace import Tokenize

ALL_LEVELS = 2**31
# One attention layer, as `find_costs` takes it.
DEFAULT_SHAPE: dict[str, Any] = {"heads": 32, "kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}


class Objective(StrEnum):
    """The quantity that groups minimise: predicted time, or KV tokens read."""

    TIME = "time"
    READS = "reads"


class Dtype(StrEnum):
    """vLLM's ``--dtype``."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


def explain(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="Request log, see below.")],
    concurrency: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Requests that decode at once; may be repeated. Default: 64."),
    ] = None,
    block_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens per KV block. Default: 512 for hash_ids, else 16."),
    ] = None,
    objective: Annotated[
        Objective, typer.Option(help="Minimise predicted time, or KV tokens read.")
    ] = Objective.TIME,
    max_levels: Annotated[
        str, typer.Option(metavar="N", help="Most levels of nested groups; CPUs use 3.")
    ] = "all",
    plot: Annotated[Path | None, typer.Option(help="Write a PNG of KV reads over time.")] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write tables and figure as one HTML file.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Folder with config.json (heads) and tokenizer.")
    ] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Query heads. Default: 32.")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="KV heads. Default: 8.")] = None,
    head_size: Annotated[int | None, typer.Option(min=1, help="Head size. Default: 128.")] = None,
    dtype: Annotated[
        Dtype, typer.Option(help="Of the KV. auto: the model's, bfloat16 for float32, as in vLLM.")
    ] = Dtype.AUTO,
    tokenizer: Annotated[Path | None, typer.Option(help="Folder, for lines of text.")] = None,
    device: Annotated[
        str | None, typer.Option(help="Device of the costs. Default: this machine.")
    ] = None,
    reorder: Annotated[
        bool, typer.Option("--reorder", help="Also replay it in the order of vllm_relay.order.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Replay a request log: shared prefixes, KV reads saved, predicted speed-up.

    TRACE is the log of vllm serve --enable-log-requests with
    VLLM_LOGGING_LEVEL=DEBUG, or a file of OpenAI's batch API, or each of its
    lines is a JSON object with one prompt:

    - hash_ids (a number per block), input_length, output_length, as Mooncake

    - prompt_token_ids (numbers)

    - prompt (text) or messages, which need --tokenizer or --model

    The last two take output_length or max_tokens, else 256. All may have a
    timestamp, in milliseconds.

    The replay is a closed loop of decode steps: requests start in the order
    of their timestamps, each as soon as there is room. The replay has no
    prefill; speed-ups are those of attention in decode steps.
    """
    with one_line_errors(), ExitStack() as files:
        levels = _levels(max_levels)
        shape = _shape(model, heads=heads, kv_heads=kv_heads, head_size=head_size)
        shape |= {} if dtype is Dtype.AUTO else {"dtype": dtype.value}
        from vllm_relay.cli.report import TOTALS, as_data, as_page, gain, show
        from vllm_relay.explain.replay import replay
        from vllm_relay.explain.trace import read_trace
        from vllm_relay.sharing.cost import reads
        from vllm_relay.sharing.cost_store import find_costs
        from vllm_relay.sharing.planner import KEEP_STEPS
        from vllm_relay.sharing.whole_files import replacing

        found = find_costs(**shape, device=device)
        by_time = objective is Objective.TIME
        seconds = found.costs.with_packing(KEEP_STEPS)
        costs = seconds.with_margin(found.margin) if by_time else reads()
        drafts: dict[str, Path] = {}
        for option, target in (("--plot", plot), ("--html", html)):
            if target is not None:
                if importlib.util.find_spec("matplotlib") is None:
                    raise ValueError(f"{option} needs matplotlib: pip install matplotlib")
                drafts[option] = files.enter_context(replacing(target))
        log = read_trace(trace, block_tokens, _tokenize(tokenizer or model))

        def run(count: int, log: Any = log) -> Any:
            with progress("requests", lines=False) as bar:
                return replay(
                    log,
                    count,
                    costs=costs,
                    seconds=seconds,
                    max_levels=levels,
                    report=lambda done: bar(f"{count:,} at once", done, len(log.requests)),
                )

        counts = concurrency or [64]
        results = [run(count) for count in counts]
        ordered = log.reordered() if reorder else None
        reordered = [run(count, ordered) for count in counts] if ordered else []
        options = {"objective": objective.value, "max_levels": max_levels}
        if drafts:
            from vllm_relay.cli.plot import draw

            figure = draw(results, trace.name)
            if "--plot" in drafts:
                drafts["--plot"].write_bytes(figure)
        if "--html" in drafts:
            page = Console(**PLAIN, record=True, width=110, file=io.StringIO())
            show(page, results, reordered, log, trace, found.source, **options)
            text = as_page(page, f"vllm-relay explain {trace.name}", figure)
            drafts["--html"].write_text(text, encoding="utf-8")

    if as_json:
        used = {**shape, "source": found.source, "margin": found.margin, **options}
        data = [as_data(result, log, used) for result in results]
        for entry, given, other in zip(data, results, reordered, strict=False):
            totals = {name: getattr(other, name) for name in TOTALS}
            entry["reordered"] = totals | {"times_as_fast": gain(given, other)}
        out.print_json(data=data if len(data) > 1 else data[0])
    else:
        show(Console(**PLAIN), results, reordered, log, trace, found.source, **options)


def _levels(given: str) -> int:
    if given == "all":
        return ALL_LEVELS
    if not given.isdecimal() or int(given) < 1:
        raise ValueError(f"--max-levels must be a whole number >= 1, or all, got {given!r}")
    return min(int(given), ALL_LEVELS)


def _shape(model: Path | None, **given: int | None) -> dict[str, Any]:
    """The head shape of the options, or of the model, and the dtype."""
    if model is None:
        shape = DEFAULT_SHAPE | {name: value for name, value in given.items() if value}
    elif any(given.values()):
        raise ValueError("--model says which heads: give it, or --heads, --kv-heads, --head-size")
    elif not model.is_dir():
        raise ValueError(f"--model {model}: is no folder; names of a hub are not looked up here")
    else:
        shape = _shape_of(model / "config.json")
    if shape["heads"] % shape["kv_heads"]:
        raise ValueError(
            f"{shape['heads']} query heads for {shape['kv_heads']} KV heads: no whole ratio"
        )
    return shape


def _shape_of(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        config = config.get("text_config") or config
        heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head_size = int(config.get("head_dim") or config["hidden_size"] // heads)
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(f"{path}: does not say which heads: {error!r}") from None
    if min(heads, kv_heads, head_size) < 1:
        raise ValueError(f"{path}: heads and head size must be >= 1")
    dtype = config.get("dtype") or config.get("torch_dtype")
    dtype = "float16" if dtype == "float16" else "bfloat16"  # others, float32 too, run in bf16
    return {"heads": heads, "kv_heads": kv_heads, "head_size": head_size, "dtype": dtype}


def _tokenize(folder: Path | None) -> "Tokenize | None":
    """A function from text or messages to token ids; the first call loads the tokenizer."""
    if folder is None:
        return None

    @cache
    def tokenizer() -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def tokenize(prompt: str | list[Any]) -> list[int]:
        if isinstance(prompt, str):
            return list(tokenizer()(prompt)["input_ids"])
        made = tokenizer().apply_chat_template(
            prompt, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return list(made)

    return tokenize
