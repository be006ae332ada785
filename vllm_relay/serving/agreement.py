"""Agreement of greedy answers with the baseline's: no speed is reported without it."""

import json
import math
import statistics
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_relay.serving.processes import Report, Server
from vllm_relay.serving.systems import REFERENCE, SYSTEMS

# Bounds on the root mean square of log-probability differences (nats): over all answers, and over
# the worst one. Rounding in bf16 gives 0.01 to 0.05, KV of another prompt more than 1.
AGREEMENT, AGREEMENT_OF_ONE = 0.1, 0.5
CHECKED_TOKENS = 16  # of each answer
# Per token: the token, its log-probability (nats), its lead over the second best (nats).
Answer = list[tuple[Any, float, float]]


class WrongAnswers(RuntimeError):
    """A system does not answer as vLLM does; its speed means nothing."""


@dataclass(frozen=True)
class Distance:
    """Distance of a system's greedy answers from the baseline's, in nats.

    Root mean square of log-probability differences up to the token where two answers part. That
    token counts with half the sum of both leads, the least by which the systems differ: a tie
    counts next to nothing, an answer that parts at once counts fully.
    """

    rms: float  # over all answers
    worst: float  # of the answer that is farthest off
    parted: int = 0  # answers with another token somewhere
    lead: float = 0.0  # largest mean of both leads where answers part: 0 is a tie

    @property
    def agrees(self) -> bool:
        return self.rms <= AGREEMENT and self.worst <= AGREEMENT_OF_ONE

    def __str__(self) -> str:
        each = f"in one answer by {self.worst:.3f}"
        return f"log-probabilities differ by {self.rms:.3f} (rms), {each}"


def distance(ours: Sequence[Answer], theirs: Sequence[Answer]) -> Distance:
    """Distance between answers to the same prompts."""
    per_answer, leads = [], []
    for a, b in zip(ours, theirs, strict=True):
        squares = []
        for (token, logprob, lead), (other, other_logprob, other_lead) in zip(a, b, strict=True):
            if token != other:
                leads.append((lead + other_lead) / 2)
                squares.append(leads[-1] ** 2)
                break
            squares.append((logprob - other_logprob) ** 2)
        per_answer.append(squares)
    total = statistics.mean(x for squares in per_answer for x in squares)
    worst = max(map(statistics.mean, per_answer))
    return Distance(math.sqrt(total), math.sqrt(worst), len(leads), max(leads, default=0.0))


def greedy(server: Server, prompts: Sequence[str]) -> list[Answer]:
    """Greedy answers to prompts sent all at once; RuntimeError if the server refuses one."""
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
    request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=600) as reply:
            choices = sorted(json.load(reply)["choices"], key=lambda choice: choice["index"])
    except urllib.error.HTTPError as error:
        detail = error.read().decode(errors="replace")[:500]
        raise RuntimeError(f"the server refuses a prompt ({error.code}): {detail}") from error
    answers = []
    for found in (choice["logprobs"] for choice in choices):
        steps = zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True)
        answers.append(
            [(token, x, x - max(top[y] for y in top if y != token)) for token, x, top in steps]
        )
    return answers


def check(
    servers: Mapping[str, Server], prompts: Sequence[str], report: Report
) -> dict[str, Distance]:
    """Distance of each system's greedy answers from the baseline's; also warms the servers up.

    Raises WrongAnswers if one is too far off. All prompts at once: sharing is as under load.
    """
    report("checking that all answer alike")
    answers = {}
    for key, server in servers.items():
        greedy(server, prompts[:1])  # puts the shared prefix into the cache
        answers[key] = greedy(server, prompts)
    found = {key: distance(answer, answers[REFERENCE]) for key, answer in answers.items()}
    for key, value in found.items():
        if not value.agrees:
            ours, theirs = SYSTEMS[key].label, SYSTEMS[REFERENCE].label
            raise WrongAnswers(f"{ours} does not answer as {theirs}: {value}; no speed is reported")
    return found
