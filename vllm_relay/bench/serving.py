"""Interactive serving, compared: real servers, the same prompts, Poisson arrivals, in turns.

After the RelayAttention paper's interactive workload (arXiv 2402.14808, section 4): latency against
the rate of requests, and the highest rate that a latency bound allows.
"""

import json
import math
import statistics
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_relay.bench.processes import Server, bench_serve, serving
from vllm_relay.bench.systems import AGREEMENT, REFERENCE, SYSTEMS

Report = Callable[[str], None]
# Prompts and tokens of the check that all systems answer alike.
CHECKED, CHECKED_TOKENS = 8, 16
EVERYTHING_AT_ONCE = math.inf


class WrongAnswers(RuntimeError):
    """A system does not answer as vLLM does; its speeds mean nothing."""


@dataclass(frozen=True)
class Load:
    """Requests of one run of the client.

    Attributes:
        rate: requests per second, Poisson; `EVERYTHING_AT_ONCE` for all at the start.
        requests: how many. tokens: that each gets.
        dataset: options of ``vllm bench serve`` that say what is asked. prompts: rendered, one per
            request, in place of a dataset.
    """

    rate: float
    requests: int
    tokens: int
    dataset: dict[str, Any] = field(default_factory=dict)
    prompts: Sequence[str] = ()

    def options(self, folder: Path) -> dict[str, Any]:
        """Of ``vllm bench serve``; prompts are written to a file in the folder."""
        if not self.prompts:
            return self.dataset
        path = folder / "prompts.jsonl"
        path.write_text("".join(json.dumps({"prompt": x}) + "\n" for x in self.prompts))
        return {
            "dataset-name": "custom",
            "dataset-path": path,
            "skip-chat-template": True,
            "custom-output-len": self.tokens,
            # the template has put them in
            "extra-body": json.dumps({"add_special_tokens": False}),
        }


def render(tokenizer: Any, system: str, asked: Sequence[str]) -> list[str]:
    """Prompts as the server's chat endpoint would render them.

    Args:
        tokenizer: of transformers, with a chat template. system: the system message.
    """
    return [
        str(
            tokenizer.apply_chat_template(
                [{"role": "system", "content": system}, {"role": "user", "content": user}],
                tokenize=False,
                add_generation_prompt=True,
            )
        )
        for user in asked
    ]


def measure(
    server: Server, tokenizer: Path | str, load: Load, seed: int, report: Report
) -> dict[str, float]:
    """One run of ``vllm bench serve``: latencies in seconds, rates per second.

    ``normalized_s`` is the paper's: end-to-end latency over tokens generated, mean of requests.
    """
    found = bench_serve(
        server,
        tokenizer,
        {
            **load.options(server.log.parent),
            "num-prompts": load.requests,
            "request-rate": load.rate,
            "seed": seed,
            "temperature": 0,
            "percentile-metrics": "ttft,tpot,itl,e2el",
            "metric-percentiles": "50,99",
            "save-detailed": True,
        },
        report,
    )
    latencies = [
        (ttft + sum(itls)) / count
        for ttft, itls, count in zip(
            found["ttfts"], found["itls"], found["output_lens"], strict=True
        )
    ]
    measured = {
        "requests_per_s": found["request_throughput"],
        "tokens_per_s": found["output_throughput"],
        "normalized_s": statistics.mean(latencies),
    }
    for name in ("ttft", "tpot", "itl"):
        measured[f"{name}_mean_s"] = found[f"mean_{name}_ms"] / 1e3
        measured[f"{name}_p50_s"] = found[f"median_{name}_ms"] / 1e3
        measured[f"{name}_p99_s"] = found[f"p99_{name}_ms"] / 1e3
    return measured


def greedy(server: Server, prompts: Sequence[str]) -> list[list[tuple[str, float]]]:
    """Greedy answers: of each prompt its tokens and their log-probabilities (nats)."""
    body = {
        "model": server.name,
        "prompt": list(prompts),
        "max_tokens": CHECKED_TOKENS,
        "temperature": 0,
        "logprobs": 0,
        "ignore_eos": True,
        "add_special_tokens": False,
        "return_tokens_as_token_ids": True,
    }
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as reply:
        choices = sorted(json.load(reply)["choices"], key=lambda choice: choice["index"])
    return [
        list(zip(x["logprobs"]["tokens"], x["logprobs"]["token_logprobs"], strict=True))
        for x in choices
    ]


def distance(ours: Sequence[Any], theirs: Sequence[Any]) -> float:
    """RMS of log-probability differences over the tokens before two greedy answers part.

    Args:
        ours, theirs: of each answer its (token, log-probability) pairs.
    """
    squares = []
    for a, b in zip(ours, theirs, strict=True):
        for (token, logprob), (other, other_logprob) in zip(a, b, strict=True):
            if token != other:
                break
            squares.append((logprob - other_logprob) ** 2)
    return math.sqrt(statistics.mean(squares)) if squares else math.inf


def compare(
    model: Path | str,
    keys: Sequence[str],
    flags: Sequence[str],
    loads: Sequence[Callable[[int], Load]],
    repeats: int,
    folder: Path,
    *,
    checked: Sequence[str],
    files: Sequence[Path] = (),
    env: dict[str, str] | None = None,
    report: Report = lambda doing: None,
) -> list[dict[str, Any]]:
    """Serve every load with every system, all servers up, one at work at a time.

    Args:
        keys: of `SYSTEMS`. flags: of every server. loads: each makes the requests of a round, the
            same for all systems. checked: prompts that all have to answer alike. files: system
            KVs. folder: for logs.

    Returns:
        A row per load, round and system.

    Raises:
        WrongAnswers: greedy answers differ from the reference's by more than `AGREEMENT`.
    """
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        servers: dict[str, Server] = {}
        for key in keys:
            system = SYSTEMS[key]

            def starting(doing: str, label: str = system.label) -> None:
                report(f"{label}: {doing}")

            servers[key] = stack.enter_context(
                serving(
                    model,
                    [*flags, *system.flags(files)],
                    folder / f"{key}.log",
                    env=env,
                    report=starting,
                )
            )
        distances = check(servers, checked[:CHECKED], report)
        for number in range(1, repeats + 1):
            for index, make in enumerate(loads):
                load = make(number)
                order = list(keys) if (number + index) % 2 else list(keys)[::-1]
                for key in order:
                    label = SYSTEMS[key].label
                    rate = "all at once" if math.isinf(load.rate) else f"{load.rate:g}/s"

                    where = f"round {number} of {repeats}, {label}, {rate}"

                    def running(doing: str, where: str = where) -> None:
                        report(f"{where}: {doing}")

                    # No two loads alike: what was asked before lies in the prefix caches.
                    seed = number * len(loads) + index
                    found = measure(servers[key], model, load, seed, running)
                    row = {"rate": load.rate, "round": number, "system": key}
                    row |= {"requests": load.requests, "tokens": load.tokens}
                    row |= {name: round(value, 5) for name, value in found.items()}
                    rows.append(row | {"logprob_rms": round(distances[key], 5)})
    return rows


def check(servers: dict[str, Server], prompts: Sequence[str], report: Report) -> dict[str, float]:
    """Distance of each system's greedy answers from the reference's; also fills prefix caches.

    Raises:
        WrongAnswers: one is too far.
    """
    report("checking that all answer alike")
    answers = {}
    for key, server in servers.items():
        greedy(server, prompts[:1])  # what is shared is in the cache when all come together
        answers[key] = greedy(server, prompts)
    found = {key: distance(answers[key], answers[REFERENCE]) for key in servers}
    for key, value in found.items():
        if not value <= AGREEMENT:
            raise WrongAnswers(
                f"{SYSTEMS[key].label} does not answer as {SYSTEMS[REFERENCE].label}: "
                f"log-probabilities differ by {value:.3f} (rms); no speed is reported"
            )
    return found
