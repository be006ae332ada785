"""The commands on system-KV files: build, inspect, verify."""

import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from vllm_relay.cli.console import PLAIN, JsonFlag, err, one_line_errors, out, progress
from vllm_relay.cli.engine import ESCAPE, errors_of_the_engine, read_engine_args
from vllm_relay.lifetime import ended_in_order
from vllm_relay.validation import Count, checked, parse_json

if TYPE_CHECKING:
    from vllm_relay.system_kv.file import SystemKVFile

ChatTemplate = Annotated[str | None, typer.Option(help="As for vllm serve; else the model's own.")]
# Largest difference that `verify --recompute` accepts, see `largest_difference`. Rounding in other
# chunks makes up to 0.1 in bf16; values of other tokens or weights make more than 1.
TOLERANCE = 0.25


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: is not UTF-8 text") from None


def _token_ids(path: Path) -> tuple[int, ...]:
    return checked(tuple[Count, ...], parse_json(path.read_bytes(), f"{path}: "), f"{path}: ")


def _outputs(output: Path, sources: list[Path]) -> list[Path]:
    """Each prompt's file: the named one, or one per prompt in the named folder."""
    if not output.is_dir():
        if len(sources) == 1:
            return [output]
        if output.exists() or output.suffix:
            why = ", this is a file" if output.exists() else "; make it, or drop the dot"
            raise ValueError(f"{output}: {len(sources)} prompts need a folder{why}")
    paths = [output / f"{source.stem}.relay" for source in sources]
    twice = {path.name for path in paths if paths.count(path) > 1}
    if twice:
        raise ValueError(f"two prompts would be written to {min(twice)}: rename one of their files")
    return paths


def _check_replaced(paths: list[Path]) -> None:
    """Raise ValueError where an output is there and is not a system-KV file: a prompt, say."""
    if any(path.exists() for path in paths):
        from vllm_relay.system_kv.file import SystemKVError, SystemKVFile

        for path in filter(Path.exists, paths):
            try:
                SystemKVFile(path)
            except SystemKVError as error:
                raise ValueError(f"{error}; it is not replaced") from None


def build(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="As for vllm serve.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="File; a folder for several.")],
    system_prompt: Annotated[
        list[Path] | None, typer.Option(help="Text file: the system message of chats.")
    ] = None,
    text: Annotated[
        list[Path] | None, typer.Option(help="Text file: the beginning of completion prompts.")
    ] = None,
    token_ids: Annotated[
        list[Path] | None, typer.Option(help="JSON file: a list of token ids, stored as they are.")
    ] = None,
    chat_template: ChatTemplate = None,
    tools: Annotated[Path | None, typer.Option(help="JSON file: the tools of requests.")] = None,
    chat_template_kwargs: Annotated[
        str, typer.Option(help="JSON: given to the chat template.")
    ] = "{}",
    as_json: JsonFlag = False,
) -> None:
    """Compute prompts' KV with the engine and write one file for each.

    Any other option is vLLM's own (--dtype, --tensor-parallel-size, --max-model-len, ...). Give
    those that change KV as you give them to vllm serve. --system-prompt, --text and --token-ids may
    be repeated; all prompts share one start of the engine.
    """
    sources = [*(system_prompt or ()), *(text or ()), *(token_ids or ())]
    with one_line_errors(), ended_in_order():
        if not sources:
            raise ValueError("nothing to build: give --system-prompt, --text or --token-ids")
        paths = _outputs(output, sources)
        _check_replaced(paths)
        messages = [(p.stem, read_text(p)) for p in system_prompt or ()]
        texts = [(p.stem, read_text(p)) for p in text or ()]
        ids = [(p.stem, _token_ids(p)) for p in token_ids or ()]
        template = {
            "tools": parse_json(tools.read_bytes(), f"{tools}: ") if tools else None,
            "template_kwargs": parse_json(
                chat_template_kwargs.encode(), "--chat-template-kwargs: "
            ),
        }
        engine_args = read_engine_args("build", model, context.args)

        from vllm_relay.system_kv.build import Builder
        from vllm_relay.system_kv.identity import read_chat_template
        from vllm_relay.system_kv.prompts import Prompt, from_system_message, from_text
        from vllm_relay.system_kv.scratch import scratch_folder

        folder = paths[0].absolute().parent
        started = errors_of_the_engine(engine_args)
        with started, scratch_folder(folder) as scratch, progress() as report:
            report("reading the model", 0, 1)
            builder = Builder(engine_args, scratch, chat_template)
            if builder.tokenizer is None and (messages or texts):
                raise ValueError("--system-prompt and --text need a tokenizer; use --token-ids")
            template["chat_template"] = read_chat_template(chat_template)
            prompts = [
                from_system_message(n, m, builder.tokenizer, **template) for n, m in messages
            ]
            prompts += [from_text(name, content, builder.tokenizer) for name, content in texts]
            prompts += [Prompt(name, "token-ids", tokens) for name, tokens in ids]
            total = sum(len(prompt.token_ids) for prompt in prompts)
            prefill = builder.prefill(prompts, lambda doing, done: report(doing, done, total))
            written: list[dict[str, Any]] = []
            for i, (prompt, path) in enumerate(zip(prompts, paths, strict=True)):
                report(f"writing {path.name}", total, total)
                manifest, size = builder.write(i, prompt, path.absolute())
                written.append({"path": str(path), "tokens": manifest.tokens, "bytes": size})
    if as_json:
        out.print_json(data={"files": written, "prefill": asdict(prefill)})
        return
    for entry, prompt in zip(written, prompts, strict=True):
        out.print(f"{entry['path']}: {entry['tokens']:,} tokens, {entry['bytes'] / 1e6:,.1f} MB")
        if prompt.note:
            err.print(f"{entry['path']}: note: {prompt.note}")
    rate = prefill.tokens / max(prefill.seconds, 1e-9)
    out.print(
        f"{prefill.tokens:,} tokens in {prefill.steps} step{'' if prefill.steps == 1 else 's'}, "
        f"{prefill.seconds:.1f} s, {rate:,.0f} tokens/s"
    )
    if len(prompts) > 1:
        factor = prefill.padded_tokens / prefill.tokens
        padded = f"{prefill.padded_tokens:,} tokens ({factor:.2f} x)"
        out.print(f"packed; padded to the longest they were {padded}")


def inspect(
    files: Annotated[list[Path], typer.Argument(help="System-KV files.")], as_json: JsonFlag = False
) -> None:
    """Show what files hold; reads their headers only."""
    from vllm_relay.system_kv.file import SystemKVFile

    with one_line_errors():
        opened = [SystemKVFile(path) for path in files]
    if as_json:
        about = ({"path": str(f.path), "bytes": f.size, "seal": f.seal} for f in opened)
        out.print_json(data=[a | asdict(f.manifest) for a, f in zip(about, opened, strict=True)])
        return
    for file in opened:
        manifest = file.manifest
        heads = sorted({(layer.kv_heads, layer.head_size) for layer in manifest.layers})
        table = Table(title=str(file.path), show_header=False, title_justify="left")
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        for key, value in {
            "prompt": f"{manifest.name} ({manifest.kind})",
            "text": _excerpt(manifest.text),
            "tokens": f"{manifest.tokens:,}",
            "size": f"{file.size / 1e6:,.1f} MB",
            "model": manifest.model,
            "layers": f"{len(manifest.layers)}, KV heads x head size: "
            + ", ".join(f"{h} x {d}" for h, d in heads),
            "dtype": f"{manifest.dtype}, KV cache {manifest.kv_cache_dtype}",
            "quantization": manifest.quantization or "none",
            "RoPE": ", ".join(f"{key} {value}" for key, value in manifest.rope.items()),
            "weights": manifest.weights,
            "tokenizer": manifest.tokenizer or "none",
            "chat template": manifest.chat_template or "none",
            "engine": ", ".join(f"{key} {value}" for key, value in manifest.engine.items()),
            "created": manifest.created,
        }.items():
            table.add_row(key, "".join(x if x.isprintable() else " " for x in value))
        Console(**PLAIN).print(table)


def _excerpt(text: str | None) -> str:
    if text is None:
        return "not known (built without a tokenizer)"
    shown = " ".join(text.split())
    return shown if len(shown) <= 160 else f"{shown[:110]} … {shown[-45:]}"


def verify(
    arguments: Annotated[
        list[str], typer.Argument(metavar="FILE...", help="System-KV files, then vLLM's options.")
    ],
    model: Annotated[
        str | None, typer.Option("--model", help="Compare with this model, as for vllm serve.")
    ] = None,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Also prefill again and compare the values.")
    ] = False,
    chat_template: ChatTemplate = None,
    as_json: JsonFlag = False,
) -> None:
    """Check every byte of files; with --model, that they fit it. Exit status 1 if one does not.

    Any other option is vLLM's own, as for build. --recompute accepts a difference of 25 % per token
    and tensor (root mean square of the difference over that of the values): rounding stays below
    10 %, other values are above 100 %.
    """
    # The parser puts unknown options among the files.
    marks = ("-", ESCAPE)
    count = next((i for i, x in enumerate(arguments) if x.startswith(marks)), len(arguments))
    files, options = [Path(x) for x in arguments[:count]], arguments[count:]
    with one_line_errors(), ended_in_order():
        if not files:
            raise ValueError("name the files before vLLM's options")
        if recompute and model is None:
            raise ValueError("--recompute needs --model")
        if options and model is None:
            raise ValueError(f"no such option without --model: {options[0].removeprefix(ESCAPE)}")
        engine_args = None if model is None else read_engine_args("verify", model, options)
        opened = [_verify_bytes(path) for path in files]
        if engine_args is not None:
            good = [(file, result) for file, result in opened if file is not None]
            _verify_model(good, engine_args, chat_template, recompute)
    results = [result for _, result in opened]
    if as_json:
        out.print_json(data=results)
    else:
        for result in results:
            verdict, style = ("bad ", "red") if result["problems"] else ("good", "green")
            for line in result["problems"] or [", ".join(result["checked"])]:
                out.print(verdict, style=style, end=" ")
                out.print(f"{result['path']}: {line}")
    if any(result["problems"] for result in results):
        raise typer.Exit(1)


def _verify_bytes(path: Path) -> tuple["SystemKVFile | None", dict[str, Any]]:
    """The file, if it is good, and what is found."""
    from vllm_relay.system_kv.file import SystemKVError, SystemKVFile

    try:
        file = SystemKVFile(path)
        started = time.monotonic()
        file.verify()
    except SystemKVError as error:
        problem = str(error).removeprefix(f"{path}: ")
        return None, {"path": str(path), "checked": [], "problems": [problem]}
    rate = file.size / 1e9 / max(time.monotonic() - started, 1e-9)
    done = f"every checksum ({rate:.2f} GB/s)"
    return file, {"path": str(path), "checked": [done], "problems": []}


def _verify_model(
    good: list[tuple["SystemKVFile", dict[str, Any]]],
    engine_args: Any,
    chat_template: str | None,
    recompute: bool,
) -> None:
    """Add to the results how the files fit a model."""
    from vllm_relay.system_kv.build import Builder, largest_difference
    from vllm_relay.system_kv.identity import differences, other_engine
    from vllm_relay.system_kv.prompts import Prompt
    from vllm_relay.system_kv.scratch import scratch_folder

    if not good:
        return
    # Not beside the files: their folder may be read-only.
    started, folder = errors_of_the_engine(engine_args), Path(tempfile.gettempdir())
    with started, scratch_folder(folder) as scratch, progress() as report:
        report("reading the model", 0, 1)
        builder = Builder(engine_args, scratch, chat_template)
        for file, result in good:
            found = differences(file.manifest, builder.identity)
            if not recompute:  # which compares what this version computes
                found += other_engine(file.manifest)
            result["problems"] += [f"differs in {entry}" for entry in found]
            if not found:
                result["checked"].append("weights, tokenizer, template and configuration")
        good = [(file, result) for file, result in good if not result["problems"]]
        if not recompute or not good:
            return
        prompts = [
            Prompt(str(i), "token-ids", file.manifest.token_ids) for i, (file, _) in enumerate(good)
        ]
        total = sum(len(prompt.token_ids) for prompt in prompts)
        builder.prefill(prompts, lambda doing, done: report(doing, done, total))
        for i, ((file, result), prompt) in enumerate(zip(good, prompts, strict=True)):
            worst, name = largest_difference(file, builder.tensors(i, prompt)[0])
            result["largest_difference"] = worst
            result["checked" if worst <= TOLERANCE else "problems"].append(
                f"values: {name} differs most, by {worst:.2%} of its rms ({TOLERANCE:.0%} allowed)"
            )
