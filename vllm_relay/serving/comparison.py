"""Interactive serving compared: real servers interleaved on the same prompts, Poisson arrivals.

The interactive workload of the RelayAttention paper (arXiv 2402.14808, section 4).
"""

import json
import math
import re
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from vllm_relay.serving.agreement import check
from vllm_relay.serving.commands import bench_serve
from vllm_relay.serving.processes import Report, Server, flag_name, serving
from vllm_relay.serving.systems import REFERENCE, SYSTEMS, memory_share

EVERYTHING_AT_ONCE = math.inf
# Percentiles of the latencies of a round's requests.
PERCENTILES = (10, 25, 50, 75, 90, 99)
Key = TypeVar("Key")


@dataclass(frozen=True)
class Load:
    """Requests of one run of the client."""

    # Requests per second, Poisson or as a trace has them; `EVERYTHING_AT_ONCE`: all at the start.
    rate: float
    requests: int
    tokens: int  # output tokens of each request; of a trace's the mean
    # Options of ``vllm bench serve`` that choose the prompts.
    dataset: dict[str, Any] = field(default_factory=dict)
    prompts: Sequence[str] = ()  # rendered, one per request, instead of a dataset

    def options(self, folder: Path) -> dict[str, Any]:
        """Options of ``vllm bench serve``; prompts are written to a file in the folder."""
        if not self.prompts:
            return self.dataset
        path = folder / "prompts.jsonl"
        path.write_text("".join(json.dumps({"prompt": x}) + "\n" for x in self.prompts))
        return {
            "dataset-name": "custom",
            "dataset-path": path,
            "skip-chat-template": True,
            "custom-output-len": self.tokens,
            # the template has added them
            "extra-body": json.dumps({"add_special_tokens": False}),
        }


def render(tokenizer: Any, system: str, questions: Sequence[str]) -> list[str]:
    """Prompts as the server's chat endpoint renders them, by transformers' tokenizer."""
    prompts = []
    for question in questions:
        chat = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        prompts.append(str(rendered))
    return prompts


def measure(
    server: Server, client: dict[str, Any], load: Load, seed: int, report: Report
) -> dict[str, float]:
    """One run of ``vllm bench serve``: latencies in seconds, rates per second.

    ``normalized_s`` is the paper's metric: end-to-end latency per output token, mean of requests;
    ``running`` the mean number of requests at once.
    """
    fixed = {
        "num-prompts": load.requests,
        "request-rate": load.rate,
        "seed": seed,
        "temperature": 0,
        "percentile-metrics": "ttft,tpot,itl,e2el",
        "metric-percentiles": ",".join(map(str, PERCENTILES)),
        "save-detailed": True,
    }
    found = bench_serve(server, {**client, **load.options(server.log.parent), **fixed}, report)
    requests = zip(found["ttfts"], found["itls"], found["output_lens"], strict=True)
    measured = {
        "completed": found["completed"],
        "requests_per_s": found["request_throughput"],
        "tokens_per_s": found["output_throughput"],
        # Little's law: the mean of requests at once is their rate times their mean latency.
        "running": found["request_throughput"] * found["mean_e2el_ms"] / 1e3,
        "normalized_s": statistics.mean((ttft + sum(itls)) / n for ttft, itls, n in requests),
    }
    for name in ("ttft", "tpot", "itl"):
        for column in ("mean", *(f"p{percent}" for percent in PERCENTILES)):
            measured[f"{name}_{column}_s"] = found[f"{column}_{name}_ms"] / 1e3
    return measured


def relay_counters(log: str) -> dict[str, int]:
    """Counters of the last `relay: steps=… kv_bytes_not_read=…` line; {} without one."""
    lines = re.findall(r"relay: (.*\bsteps=\d.*)", log)
    return {k: int(v) for k, v in re.findall(r"(\w+)=(\d+)", lines[-1])} if lines else {}


def interleaved(keys: Sequence[Key], number: int) -> list[Key]:
    """Order of the systems in a round: rows of a Latin square, alternately forward and backward.

    In as many rounds as systems (twice as many for odd counts) each system takes each place once,
    and none always follows the same other.
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
    after_round: Callable[[int, list[dict[str, Any]]], None] = lambda number, rows: None,
) -> list[dict[str, Any]]:
    """Serves every load with every system: all servers are up, one at a time is under load.

    Args:
        keys: of `SYSTEMS`. flags: options of every server; each gets a share of the memory
            (`memory_share`) unless they have ``--gpu-memory-utilization``. loads: round number ->
            requests, the same for all systems. checked: prompts that all must answer alike.
            client: options of ``vllm bench serve``. files: system KV. folder: for logs. give_up:
            seconds per token; a system above it in round 1 is skipped at higher rates, except the
            baseline.
        after_round: called with a round's number and all rows so far; with 0 before round 1.

    Returns:
        A row per load, round and system; ``server_steps_relayed`` is of a server's whole life.
        No row but WrongAnswers if greedy answers are too far from the baseline's.
    """
    rows: list[dict[str, Any]] = []
    servers: dict[str, Server] = {}
    if "gpu-memory-utilization" not in map(flag_name, flags):
        flags = [*flags, "--gpu-memory-utilization", str(memory_share(len(keys)))]

    def report_of(what: str) -> Report:
        return lambda doing: report(f"{what}: {doing}")

    with ExitStack() as stack:
        for key in keys:
            system_flags = [*flags, *SYSTEMS[key].flags(files)]
            log = folder / f"{key}.log"
            starting = report_of(SYSTEMS[key].label)
            # One at a time: each measures what it finds free, a GPU's memory or attention's speed.
            server = serving(model, system_flags, log, env=env, report=starting)
            servers[key] = stack.enter_context(server)
        distances = check(servers, checked, report)
        highest = dict.fromkeys(keys, math.inf)
        after_round(0, rows)
        for number, (index, make) in product(range(1, repeats + 1), enumerate(loads)):
            load = make(number)
            able = [x for x in keys if math.isinf(load.rate) or load.rate <= highest[x]]
            for key in interleaved(able, number + index):
                rate = "all at once" if math.isinf(load.rate) else f"{load.rate:g}/s"
                where = report_of(f"round {number} of {repeats}, {SYSTEMS[key].label}, {rate}")
                # The client's datasets: other prompts for every load and round.
                seed = number * len(loads) + index
                found = measure(servers[key], client or {}, load, seed, where)
                row: dict[str, Any] = {"rate": load.rate, "round": number, "system": key}
                row |= {"requests": int(found.pop("completed")), "tokens": load.tokens}
                row |= {name: round(value, 5) for name, value in found.items()}
                row["logprob_rms"] = round(distances[key].rms, 5)
                row["logprob_worst"] = round(distances[key].worst, 5)
                rows.append(row)
                if number == 1 and key != REFERENCE and found["normalized_s"] > give_up:
                    highest[key] = min(highest[key], load.rate)
            if index == len(loads) - 1:
                after_round(number, rows)
    for row in rows:  # the servers have ended and logged their counters
        text = servers[row["system"]].text()
        row["server_steps_relayed"] = relay_counters(text).get("steps_relayed", 0)
    return rows
