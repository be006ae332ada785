"""Interactive serving, compared: real servers, the same prompts, Poisson arrivals, in turns.

After the RelayAttention paper's interactive workload (arXiv 2402.14808, section 4): latency against
the rate of requests, and the highest rate that a latency bound allows.
"""

import json
import math
import re
import statistics
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_relay.serving.processes import Server, bench_serve, flag_name, started
from vllm_relay.serving.systems import (
    AGREEMENT,
    AGREEMENT_OF_ONE,
    REFERENCE,
    SYSTEMS,
    memory_share,
)

Report = Callable[[str], None]
# Tokens of each answer in the check that all systems answer alike.
CHECKED_TOKENS = 16
# Seconds until a server must be ready: models can be large, and kernels compile.
READY = 1800.0
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
    server: Server, client: dict[str, Any], load: Load, seed: int, report: Report
) -> dict[str, float]:
    """One run of ``vllm bench serve`` with these options: latencies in seconds, rates per second.

    ``normalized_s`` is the paper's: end-to-end latency over tokens generated, mean of requests.
    """
    found = bench_serve(
        server,
        {
            **client,
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
        "completed": found["completed"],
        "requests_per_s": found["request_throughput"],
        "tokens_per_s": found["output_throughput"],
        "normalized_s": statistics.mean(latencies),
    }
    for name in ("ttft", "tpot", "itl"):
        measured[f"{name}_mean_s"] = found[f"mean_{name}_ms"] / 1e3
        measured[f"{name}_p50_s"] = found[f"median_{name}_ms"] / 1e3
        measured[f"{name}_p99_s"] = found[f"p99_{name}_ms"] / 1e3
    return measured


# Of an answer, per token: the token, its log-probability (nats) and its lead over the second best.
Answer = list[tuple[Any, float, float]]


@dataclass(frozen=True)
class Distance:
    """Between a system's greedy answers and the reference's.

    Root mean squares (nats) of the differences of log-probabilities up to where two answers part;
    there, of half the leads of the two tokens, which is what the systems differ by at least in
    either: a tie counts next to nothing, and an answer that parts at once counts all the same.

    Attributes:
        rms: of all answers together. worst: of the answer that is farthest off.
    """

    rms: float
    worst: float

    @property
    def agrees(self) -> bool:
        return self.rms <= AGREEMENT and self.worst <= AGREEMENT_OF_ONE

    def __str__(self) -> str:
        return (
            f"log-probabilities differ by {self.rms:.3f} (rms), in one answer by {self.worst:.3f}"
        )


def distance(ours: Sequence[Answer], theirs: Sequence[Answer]) -> Distance:
    """Of answers to the same prompts."""
    of_answers = []
    for a, b in zip(ours, theirs, strict=True):
        squares = []
        for (token, logprob, lead), (other, other_logprob, other_lead) in zip(a, b, strict=True):
            if token != other:
                squares.append(((lead + other_lead) / 2) ** 2)
                break
            squares.append((logprob - other_logprob) ** 2)
        of_answers.append(squares)
    every = [x for squares in of_answers for x in squares]
    worst = max(statistics.mean(squares) for squares in of_answers)
    return Distance(math.sqrt(statistics.mean(every)), math.sqrt(worst))


def greedy(server: Server, prompts: Sequence[str]) -> list[Answer]:
    """Greedy answers to prompts that come all at once."""
    body = {
        "model": server.name,
        "prompt": list(prompts),
        "max_tokens": CHECKED_TOKENS,
        "temperature": 0,
        "logprobs": 2,
        "ignore_eos": True,
        "add_special_tokens": False,
        "return_tokens_as_token_ids": True,
    }
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=600) as reply:
            choices = sorted(json.load(reply)["choices"], key=lambda choice: choice["index"])
    except urllib.error.HTTPError as error:
        told = error.read().decode(errors="replace")[:500]
        raise RuntimeError(f"the server refuses a prompt ({error.code}): {told}") from error
    answers = []
    for choice in choices:
        found = choice["logprobs"]
        answers.append(
            [
                (token, logprob, logprob - max(x for key, x in top.items() if key != token))
                for token, logprob, top in zip(
                    found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
                )
            ]
        )
    return answers


def relay_counters(log: str) -> dict[str, int]:
    """The counters of the last `relay: steps=… kv_bytes_not_read=…` line; {} without one."""
    lines = re.findall(r"relay: (.*\bsteps=\d.*)", log)
    return {k: int(v) for k, v in re.findall(r"(\w+)=(\d+)", lines[-1])} if lines else {}


def in_turn(keys: Sequence[str], number: int) -> list[str]:
    """The order of a round: in so many rounds as there are keys each has each place once.

    Two rounds for each key where they are odd. None always follows the same other.
    """
    forward = -1 if number % 2 else 1
    return [keys[(number + forward * place) % len(keys)] for place in range(len(keys))]


def compare(
    model: Path | str,
    keys: Sequence[str],
    flags: Sequence[str],
    loads: Sequence[Callable[[int], Load]],
    repeats: int,
    folder: Path,
    *,
    checked: Sequence[str],
    client: dict[str, Any] | None = None,
    files: Sequence[Path] = (),
    env: dict[str, str] | None = None,
    give_up: float = math.inf,
    report: Report = lambda doing: None,
) -> list[dict[str, Any]]:
    """Serve every load with every system, all servers up, one at work at a time.

    Args:
        keys: of `SYSTEMS`. flags: of every server; on a GPU each gets an equal share of its memory
            unless they have ``--gpu-memory-utilization``. loads: each makes the requests of a
            round, the same for all systems. checked: prompts that all have to answer alike.
            client: options of ``vllm bench serve``. files: system KVs. folder: for logs.
            give_up: seconds per token; a system that needs more at a rate in the first round is not
            measured at higher ones (the reference is, and all are with everything at once).

    Returns:
        A row per load, round and system; ``server_steps_relayed`` is of a server's whole life.

    Raises:
        WrongAnswers: greedy answers differ too much from the reference's.
    """
    rows: list[dict[str, Any]] = []
    servers: dict[str, Server] = {}
    share = memory_share(len(keys))
    if share is not None and "gpu-memory-utilization" not in map(flag_name, flags):
        flags = [*flags, "--gpu-memory-utilization", str(share)]
    with ExitStack() as stack:
        for key in keys:
            mine = [*flags, *SYSTEMS[key].flags(files)]
            servers[key] = stack.enter_context(started(model, mine, folder / f"{key}.log", env=env))
            if share is not None:  # each looks at what is free of the GPU's memory
                wait_ready(key, servers[key], report)
        for key, server in servers.items():
            wait_ready(key, server, report)
        distances = check(servers, checked, report)
        highest = dict.fromkeys(keys, math.inf)
        for number in range(1, repeats + 1):
            for index, make in enumerate(loads):
                load = make(number)
                able = [x for x in keys if math.isinf(load.rate) or load.rate <= highest[x]]
                for key in in_turn(able, number + index):
                    label = SYSTEMS[key].label
                    rate = "all at once" if math.isinf(load.rate) else f"{load.rate:g}/s"
                    where = f"round {number} of {repeats}, {label}, {rate}"

                    def running(doing: str, where: str = where) -> None:
                        report(f"{where}: {doing}")

                    # The client's own datasets: other prompts for every load and round.
                    seed = number * len(loads) + index
                    found = measure(servers[key], client or {}, load, seed, running)
                    row = {"rate": load.rate, "round": number, "system": key}
                    row |= {"requests": int(found.pop("completed")), "tokens": load.tokens}
                    row |= {name: round(value, 5) for name, value in found.items()}
                    row["logprob_rms"] = round(distances[key].rms, 5)
                    row["logprob_worst"] = round(distances[key].worst, 5)
                    rows.append(row)
                    if number == 1 and key != REFERENCE and found["normalized_s"] > give_up:
                        highest[key] = min(highest[key], load.rate)
    for key, server in servers.items():  # ended: each has logged what it relayed
        relayed = relay_counters(server.text()).get("steps_relayed", 0)
        for row in rows:
            if row["system"] == key:
                row["server_steps_relayed"] = relayed
    return rows


def wait_ready(key: str, server: Server, report: Report) -> None:
    """Return once it answers, see `Server.wait_ready`."""
    server.wait_ready(READY, lambda doing: report(f"{SYSTEMS[key].label}: {doing}"))


def check(
    servers: dict[str, Server], prompts: Sequence[str], report: Report
) -> dict[str, Distance]:
    """Distance of each system's greedy answers from the reference's; also warms the servers up.

    The prompts come all at once, as in a load: what is shared is attended to as it will be.

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
        if not value.agrees:
            raise WrongAnswers(
                f"{SYSTEMS[key].label} does not answer as {SYSTEMS[REFERENCE].label}: {value}; "
                "no speed is reported"
            )
    return found
