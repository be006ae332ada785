"""``vllm-relay bench``: the speed-up of relay on the user's own model and prompt."""

import math
import re
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from vllm_relay.cli.console import PLAIN, JsonFlag, err, one_line_errors, out
from vllm_relay.cli.engine import ESCAPE, build_options
from vllm_relay.lifetime import ended_in_order
from vllm_relay.serving.processes import flag_name, flag_value, kept_logs

if TYPE_CHECKING:
    from vllm_relay.serving.comparison import Load

# Text in a log -> reason and remedy.
HINTS = {
    "less than one KV block": "the prompt is shorter than one KV block: --no-system-kv leaves "
    "files out"
}
# Options of `vllm serve` that the comparison sets.
OURS = {
    "attention-backend": "is what is compared",
    "attention-config": "is what is compared",
    "enable-prefix-caching": "is set for each system",
    "no-enable-prefix-caching": "is set for each system",
    **dict.fromkeys(("host", "port", "uds", "api-key"), "is set for each server"),
}
# Questions without --questions.
QUESTIONS = (
    "What is this about?",
    "Summarise it in one sentence.",
    "What is the most important point?",
    "What should I do first?",
    "Who is it meant for?",
    "What does it not allow?",
    "Give one example.",
    "Is anything unclear in it?",
)


def bench(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="As for vllm serve.")],
    system_prompt: Annotated[
        Path, typer.Option(help="Text that every request begins with, UTF-8.")
    ],
    questions: Annotated[
        Path | None, typer.Option(help="One per line, UTF-8; default: made up.")
    ] = None,
    requests: Annotated[int, typer.Option(min=2, help="Requests per measurement.")] = 32,
    tokens: Annotated[int, typer.Option(min=2, help="Output tokens per request.")] = 64,
    rate: Annotated[
        list[float] | None,
        typer.Option(help="Requests per second; repeat it. Default: all at once."),
    ] = None,
    bound: Annotated[
        float | None, typer.Option(help="Seconds per token; prints the highest --rate within it.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    without_caching: Annotated[
        bool, typer.Option("--without-caching", help="Also vLLM without prefix caching.")
    ] = False,
    system_kv: Annotated[
        bool, typer.Option(help="Also relay with the prompt's KV from a file.")
    ] = True,
    as_json: JsonFlag = False,
) -> None:
    """Serve your model and prompt with vLLM's own attention and with relay, side by side.

    Starts real servers, sends all of them the same requests, interleaved, and prints the speed-up
    of relay. No speed is shown unless the answers agree. Any other option is vLLM's own: give
    those that you serve with. All servers are up at once: each gets an equal share of a GPU's
    memory, on a CPU of what is free, unless you give --gpu-memory-utilization. A table is shown
    after the first round; Ctrl-C ends the command with the table of the whole rounds.
    """
    from vllm_relay.serving import comparison, gains
    from vllm_relay.serving.commands import build_system_kv
    from vllm_relay.serving.provenance import provenance
    from vllm_relay.serving.systems import FOUR, SYSTEMS

    flags = [x.removeprefix(ESCAPE) for x in context.args if x != "--"]
    console = Console(**PLAIN, stderr=True)
    with one_line_errors(), ended_in_order(), ExitStack() as stack:
        for name in map(flag_name, flags):
            if reason := OURS.get(name.partition(".")[0]):
                raise ValueError(f"--{name} {reason}: leave it out")
        if bound is not None and not rate:
            raise ValueError("--bound needs --rate: the rates to try")
        for at in rate or []:
            if not 0 < at < math.inf:
                raise ValueError(f"--rate is {at:g}: must be requests per second, more than 0")
        if find_spec("pandas") is None:
            raise ValueError("`vllm bench serve` needs pandas here: pip install pandas")
        prompt = system_prompt.read_text(encoding="utf-8")
        rates = rate or [comparison.EVERYTHING_AT_ONCE]
        # The check asks the first ones; questions asked before would hit the prefix caches.
        asked = _questions(questions, requests * (1 + repeats * len(rates)))
        keys = [key for key in FOUR if without_caching or SYSTEMS[key].caching]
        keys = [key for key in keys if system_kv or not SYSTEMS[key].system_kv]
        plan = _plan([SYSTEMS[key].label for key in keys], repeats, len(rates), requests, tokens)
        err.print(f"vllm-relay: {plan}; the expected time is told after round 1")
        folder = stack.enter_context(kept_logs("vllm-relay-bench-", HINTS))
        report = _reporter(console, stack)
        report("reading the tokenizer")
        client, tokenizer = _tokenizer(model, flags)
        files = []
        if system_kv:
            text = folder / "prompt.txt"
            text.write_text(prompt, encoding="utf-8")
            options = ["--system-prompt", str(text), *build_options("bench", flags)]
            files = [build_system_kv(model, folder / "prompt.relay", options, report=report)]
        prompts = comparison.render(tokenizer, prompt, asked)

        def load(number: int, index: int, at: float) -> "Load":
            begin = requests * (1 + (number - 1) * len(rates) + index)
            chosen = prompts[begin : begin + requests]
            return comparison.Load(at, requests, tokens, prompts=chosen)

        loads = [partial(load, index=index, at=at) for index, at in enumerate(rates)]
        rounds = Rounds(repeats, console, bound)
        try:
            rows = comparison.compare(
                model, keys, flags, loads, repeats, folder, after_round=rounds.after,
                checked=prompts[:requests], client=client, files=files, report=report,
            )  # fmt: skip
        except KeyboardInterrupt:
            if not rounds.rows:
                raise
            rows = rounds.rows
            err.print(f"vllm-relay: stopped in round {rounds.done + 1} of {repeats}")
    source = provenance()
    if as_json:
        data: dict[str, Any] = {"gains": _finite(gains.summary(rows)), "rows": _finite(rows)}
        data["provenance"] = source
        if bound is not None:
            data["sustained"] = gains.sustained(rows, bound)
        out.print_json(data=data)
        raise typer.Exit(rounds.status)
    shown = Console(**PLAIN)
    gains.show(shown, "Serving with and without relay (medians of rounds)", rows, bound)
    shown.print(
        "{device}, {cores} cores; vLLM {vllm}, PyTorch {torch}, vllm-relay {vllm_relay}; "
        "{date}".format(**source),
        soft_wrap=True,
    )
    raise typer.Exit(rounds.status)


class Rounds:
    """Rows of the whole rounds so far, and what is said after the first one.

    Args:
        repeats: rounds in all. console: for the table. bound: seconds per token, see `gains.show`.
    """

    def __init__(self, repeats: int, console: Console, bound: float | None = None) -> None:
        self.repeats, self.console, self.bound = repeats, console, bound
        self.rows: list[dict[str, Any]] = []
        self.done = 0
        self._began_s = time.monotonic()

    @property
    def status(self) -> int:
        """Exit status of the command: 0, or 130 if rounds are missing."""
        return 0 if self.done == self.repeats else 130

    def after(self, number: int, rows: list[dict[str, Any]]) -> None:
        """Keeps the rows of a round; 0 is the start of the first."""
        from vllm_relay.serving import gains

        self.done, self.rows = number, list(rows)
        if number == 0:
            self._began_s = time.monotonic()
        elif number == 1 and self.repeats > 1:
            took_s = time.monotonic() - self._began_s
            gains.show(self.console, f"Round 1 of {self.repeats}", self.rows, self.bound)
            left = f"about {(self.repeats - 1) * took_s:,.0f} s for the others"
            err.print(f"vllm-relay: round 1 took {took_s:,.0f} s, {left}; Ctrl-C keeps them")


def _plan(labels: Sequence[str], repeats: int, rates: int, requests: int, tokens: int) -> str:
    """One line: servers, rounds and requests of a comparison."""

    def count(number: int, what: str) -> str:
        return f"{number:,} {what}{'' if number == 1 else 's'}"

    total = repeats * rates * requests * len(labels)
    return (
        f"{count(len(labels), 'server')} ({', '.join(labels)}), {count(repeats, 'round')} of "
        f"{count(rates, 'load')}: {total:,} requests of {tokens:,} output tokens"
    )


def _finite(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """JSON has no infinity: null means all at once."""
    return [{**row, "rate": None if math.isinf(row["rate"]) else row["rate"]} for row in rows]


def _questions(path: Path | None, count: int) -> list[str]:
    """``count`` different questions."""
    asked = list(QUESTIONS)
    if path is not None:
        lines = path.read_text(encoding="utf-8").splitlines()
        asked = [line.strip() for line in lines if line.strip()]
        if not asked:
            raise ValueError(f"{path} has no questions")
    # Repeated ones are numbered: a prompt sent before is in the prefix cache.
    return [
        asked[i % len(asked)] + ("" if i < len(asked) else f" ({i // len(asked)})")
        for i in range(count)
    ]


def _tokenizer(model: str, flags: Sequence[str]) -> tuple[dict[str, Any], Any]:
    """The tokenizer that servers with these options use, and the client's options for it."""
    from transformers import AutoTokenizer

    name = flag_value(flags, "tokenizer") or model
    client: dict[str, Any] = {"tokenizer": name}
    if trusted := "trust-remote-code" in map(flag_name, flags):
        client["trust-remote-code"] = True
    tokenizer = AutoTokenizer.from_pretrained(
        name,
        revision=flag_value(flags, "tokenizer-revision") or flag_value(flags, "revision") or "main",
        trust_remote_code=trusted or None,
    )
    if template := flag_value(flags, "chat-template"):
        path = Path(template)
        tokenizer.chat_template = path.read_text(encoding="utf-8") if path.is_file() else template
    if not tokenizer.chat_template:
        raise ValueError(f"{name} has no chat template: give --chat-template")
    return client, tokenizer


def _reporter(console: Console, stack: ExitStack) -> Any:
    """Reports progress in a status line; without a terminal as plain lines, each once."""
    if console.is_terminal:
        return stack.enter_context(console.status("")).update
    printed: set[str] = set()

    def report(doing: str) -> None:
        step = re.sub(r"\d+ of \d+ requests", "", doing)
        if step not in printed:
            printed.add(step)
            err.print(f"vllm-relay: {doing}")

    return report
