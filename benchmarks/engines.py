"""The systems that are compared, as engines in one run: they take turns on the same prompts."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import OFFLINE, ROOT, provenance, step, write_csv
from vllm_relay.bench.processes import beside_python
from vllm_relay.bench.serving import WrongAnswers, distance
from vllm_relay.bench.systems import AGREEMENT, REFERENCE, SYSTEMS, System

# Tokens of a KV block of the CPU engine.
KV_BLOCK = 128

Answer = list[tuple[int, float]]


class SkipAttention:
    """vLLM's ``worker_extension_cls`` of the system that does everything but attention."""

    def skip_attention(self) -> int:
        """Every attention layer gives zeros from now on; KV is written as before."""
        from vllm.v1.attention.backend import AttentionImpl

        context = self.vllm_config.compilation_config.static_forward_context  # type: ignore[attr-defined]
        layers = [
            x for x in context.values() if isinstance(getattr(x, "impl", None), AttentionImpl)
        ]

        def zeros(*args: Any, output: Any = None, **kwargs: Any) -> Any:
            out = output if output is not None else args[6]
            return out.zero_()

        for layer in layers:
            layer.impl.forward = zeros
        return len(layers)


@dataclass(frozen=True)
class Limits:
    """What every engine of a run has to hold."""

    max_model_len: int
    max_num_seqs: int
    kv_gib: int = 2


@dataclass
class Finished:
    """One batch.

    Attributes:
        seconds: from its submission. tokens: made. cached: of prompts, found in the prefix cache.
        answers: in order. decode_tok_s: from the moment that every request has its second token.
    """

    seconds: float
    tokens: int
    cached: int
    answers: list[Answer]
    decode_tok_s: float


class Engine:
    """One `vllm.LLM`, stepped by hand so that decode steps can be timed apart from prefill."""

    def __init__(
        self, model: Path, system: System, limits: Limits, settings: dict[str, Any] | None = None
    ) -> None:
        from vllm import LLM  # seconds to import: --help should not wait for it

        self._llm = LLM(
            str(model),
            attention_backend="relay" if system.relay else "CPU_ATTN",
            additional_config={"relay": {**system.settings, **(settings or {})}},
            skip_tokenizer_init=True,
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            enforce_eager=True,
            enable_prefix_caching=system.caching,
            worker_extension_cls="benchmarks.engines.SkipAttention",
        )
        if not system.attention:
            assert self._llm.collective_rpc("skip_attention")[0] > 0
        self._requests = 0

    def close(self) -> None:
        """End the engine's process."""
        self._llm.llm_engine.engine_core.shutdown()

    def counters(self) -> dict[str, int]:
        return dict(self._llm.collective_rpc("relay_counters")[0])

    def forget(self) -> None:
        """Empty the prefix cache; pinned system KVs stay."""
        self._llm.reset_prefix_cache()

    def finish(self, prompts: Sequence[list[int]], lengths: Sequence[int]) -> Finished:
        """Produce ``lengths[i]`` tokens for each prompt, all submitted at once."""
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        outputs: dict[str, Any] = {}
        cached: dict[str, int] = {}
        started = time.perf_counter()
        for prompt, length in zip(prompts, lengths, strict=True):
            self._requests += 1
            params = SamplingParams(
                temperature=0, max_tokens=length, ignore_eos=True, detokenize=False, logprobs=0
            )
            engine.add_request(str(self._requests), {"prompt_token_ids": prompt}, params)
        begun, counted = 0.0, 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                outputs[output.request_id] = output.outputs[0]
                cached[output.request_id] = output.num_cached_tokens or 0
            if not begun and len(outputs) == len(prompts):
                made = [len(o.token_ids) for o in outputs.values()]
                if min(made) >= 2:
                    begun, counted = time.perf_counter(), sum(made)
        ended = time.perf_counter()
        in_order = [o for _, o in sorted(outputs.items(), key=lambda item: int(item[0]))]
        tokens = sum(len(o.token_ids) for o in in_order)
        return Finished(
            ended - started,
            tokens,
            sum(cached.values()),
            [
                [(t, step[t].logprob) for t, step in zip(o.token_ids, o.logprobs, strict=True)]
                for o in in_order
            ],
            (tokens - counted) / (ended - begun) if begun and ended > begun else 0.0,
        )


def build_files(
    model: Path, prefixes: Sequence[Sequence[int]], folder: Path, max_model_len: int
) -> list[Path]:
    """Compute the KV of these token ids with the real command, ``vllm-relay build``."""
    command = beside_python("vllm-relay", "build", "--model", str(model), "--enforce-eager")
    command += ["--skip-tokenizer-init", "--max-model-len", str(max_model_len), "-o", str(folder)]
    for number, prefix in enumerate(prefixes):
        source = folder / f"prefix-{number}.json"
        source.write_text(json.dumps(list(prefix)))
        command += ["--token-ids", str(source)]
    done = subprocess.run(
        command, env={**os.environ, **OFFLINE}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"vllm-relay build failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return sorted(folder.glob("*.relay"))


@dataclass
class Measured:
    """Of one case: what each system took, in rounds in which all had the same prompts."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    decode_tok_s: dict[str, list[float]] = field(default_factory=dict)
    tokens: int = 0
    # Largest distance of a system's answers from those of the reference.
    distances: dict[str, float] = field(default_factory=dict)
    # What each relay engine counted meanwhile, see `vllm_relay.metrics.counters`.
    counted: dict[str, dict[str, int]] = field(default_factory=dict)
    right: dict[str, int] = field(default_factory=dict)

    def speed_up(self, key: str, over: str = REFERENCE) -> tuple[float, float, float]:
        """Of one system over another: median, least and most of the rounds."""
        ratios = [a / b for a, b in zip(self.seconds[over], self.seconds[key], strict=True)]
        return statistics.median(ratios), min(ratios), max(ratios)

    def wrong(self) -> list[str]:
        """Systems whose answers are not the reference's; no speed of theirs means anything."""
        return [key for key, found in self.distances.items() if not found <= AGREEMENT]

    def rows(self, **case: Any) -> list[dict[str, Any]]:
        """Of a CSV, one per system."""
        rows = []
        for key, taken in self.seconds.items():
            row = {**case, "system": key, "rounds": len(taken), "tokens": self.tokens}
            for name, value in zip(
                ("seconds", "seconds_min", "seconds_max"),
                (statistics.median(taken), min(taken), max(taken)),
                strict=True,
            ):
                row[name] = round(value, 4)
            row["tok_s"] = round(self.tokens / statistics.median(taken), 2)
            if REFERENCE in self.seconds:
                found = self.speed_up(key)
                names = ("times_as_fast_as_stock", "times_min", "times_max")
                row |= {name: round(value, 4) for name, value in zip(names, found, strict=True)}
            decode = self.decode_tok_s.get(key)
            row["decode_tok_s"] = round(statistics.median(decode), 2) if decode else ""
            row["logprob_rms"] = round(self.distances[key], 5) if key in self.distances else ""
            row["steps_relayed"] = self.counted.get(key, {}).get("steps_relayed", "")
            if self.right:
                row["right"] = self.right[key]
            rows.append(row)
        return rows


# Of a round: its prompts and how many tokens each gets.
Round = tuple[Sequence[list[int]], Sequence[int]]


@dataclass(frozen=True)
class Case:
    """One point of a benchmark.

    Attributes:
        columns: what its rows say of it. make_round: of the number of a round, of which number 0
            warms up and is not measured.
        forget: empty the prefix caches before each round: every round computes its prefixes.
        right: of a round's answers, how many are what was asked for; of the last round.
    """

    columns: dict[str, Any]
    make_round: Callable[[int], Round]
    forget: bool = False
    right: Callable[[list[Answer]], int] | None = None


def compare(
    engines: dict[str, Engine],
    case: Case,
    repeats: int,
    report: Callable[[str], None] = lambda doing: None,
) -> Measured:
    """Let the engines take turns, first in one order, then in the other."""
    measured = Measured()
    before = {key: engine.counters() for key, engine in engines.items()}
    for number in range(repeats + 1):
        prompts, lengths = case.make_round(number)
        answers = {}
        for key in list(engines) if number % 2 else list(engines)[::-1]:
            report(f"round {number} of {repeats}: {SYSTEMS[key].label}")
            if case.forget:
                engines[key].forget()
                # Pinned system KVs are written again before anything is scheduled: not in our time.
                engines[key].finish([[5]], [1])
            done = engines[key].finish(prompts, lengths)
            answers[key] = done.answers
            measured.tokens = done.tokens
            if number:
                measured.seconds.setdefault(key, []).append(done.seconds)
                measured.decode_tok_s.setdefault(key, []).append(done.decode_tok_s)
        if case.right:
            measured.right = {key: case.right(found) for key, found in answers.items()}
        if REFERENCE not in answers:
            continue
        for key in engines:
            if SYSTEMS[key].attention:
                found = distance(answers[key], answers[REFERENCE])
                measured.distances[key] = max(measured.distances.get(key, 0.0), found)
    for key, engine in engines.items():
        if SYSTEMS[key].relay:
            after = engine.counters()
            measured.counted[key] = {name: after[name] - n for name, n in before[key].items()}
    # in the order that the systems are shown in, whoever went first
    measured.seconds = {key: measured.seconds[key] for key in engines}
    return measured


@contextmanager
def engines(
    model: Path,
    keys: Sequence[str],
    limits: Limits,
    *,
    prefixes: Sequence[Sequence[int]] = (),
    settings: dict[str, Any] | None = None,
    report: Callable[[str], None] = lambda doing: None,
) -> Iterator[dict[str, Engine]]:
    """Start these systems.

    Args:
        prefixes: token ids whose KV `relay-system-kv` loads from files, built here.
        settings: relay's, beside those that a system has.
    """
    os.environ.update(OFFLINE)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(limits.kv_gib))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # Workers import this folder's modules by name.
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    started: dict[str, Engine] = {}
    with tempfile.TemporaryDirectory() as folder:
        files: list[str] = []
        # What does not fill a KV block cannot be pinned.
        pinned = [prefix for prefix in prefixes if len(prefix) >= KV_BLOCK]
        if pinned and any(SYSTEMS[key].system_kv for key in keys):
            report(f"computing the KV of {len(pinned)} prefixes")
            built = build_files(model, pinned, Path(folder), limits.max_model_len)
            files = list(map(str, built))
        try:
            for key in keys:
                report(f"starting: {SYSTEMS[key].label}")
                loaded = {"system_kv": files} if SYSTEMS[key].system_kv else {}
                started[key] = Engine(model, SYSTEMS[key], limits, {**(settings or {}), **loaded})
            yield started
        finally:
            for engine in started.values():
                engine.close()


def run(
    console: Console,
    model: Path,
    keys: Sequence[str],
    limits: Limits,
    cases: Sequence[Case],
    repeats: int,
    prefixes: Sequence[Sequence[int]] = (),
) -> list[dict[str, Any]]:
    """Start the engines and measure all cases: rows, one per case and system.

    Raises:
        WrongAnswers: a system's answers are not the reference's.
    """
    with ExitStack() as stack:
        with step(console, f"{len(keys)} engines") as report:
            started = stack.enter_context(
                engines(model, keys, limits, prefixes=prefixes, report=report)
            )
        return measure(started, cases, repeats, console)


def measure(
    started: dict[str, Engine], cases: Sequence[Case], repeats: int, console: Console
) -> list[dict[str, Any]]:
    """As `run`, with engines that are there."""
    rows = []
    for case in cases:
        title = ", ".join(f"{name.replace('_', ' ')} {x}" for name, x in case.columns.items())
        with step(console, title) as report:
            measured = compare(started, case, repeats, report)
        if wrong := measured.wrong():
            raise WrongAnswers(
                f"{title}: answers differ from vLLM's ({', '.join(wrong)}: "
                f"{measured.distances}); no speed is reported"
            )
        rows += measured.rows(**case.columns)
    return rows


def make_console() -> Console:
    """Without a terminal rich assumes 80 columns; the tables need more."""
    return Console(width=None if sys.stdout.isatty() else 110, highlight=False)


def show(console: Console, title: str, rows: Sequence[dict[str, Any]], *columns: str) -> None:
    """A table of the rows that `Measured.rows` made; columns: of the cases."""
    table = Table(title=title)
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    table.add_column("system")
    for heading in ("seconds", "tokens/s", "times vLLM", "min to max", "logprob rms"):
        table.add_column(heading, justify="right")
    for row in rows:
        distance = row["logprob_rms"]
        table.add_row(
            *(f"{row[x]:,}" if isinstance(row[x], int) else str(row[x]) for x in columns),
            SYSTEMS[row["system"]].label,
            f"{row['seconds']:.2f}",
            f"{row['tok_s']:,.0f}",
            f"{row['times_as_fast_as_stock']:.2f}",
            f"{row['times_min']:.2f} to {row['times_max']:.2f}",
            "" if distance == "" else f"{distance:.4f}",
            end_section=row["system"] == rows[-1]["system"],
        )
    console.print(table)


def save(console: Console, name: str, rows: list[dict[str, Any]]) -> Path:
    """Write a CSV to benchmarks/results, with provenance."""
    path = write_csv(ROOT / "benchmarks" / "results" / f"{name}.csv", rows, provenance())
    console.print(f"wrote {path.relative_to(ROOT)}")
    return path
