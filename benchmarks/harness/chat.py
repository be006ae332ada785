"""Chats under one long system prompt: questions, requests, agreement of answers."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import openai
from openai.types.chat import ChatCompletionMessageParam
from tokenizers import Tokenizer

from benchmarks.harness.environment import MODEL_NAME
from vllm_relay.serving.processes import Server

LICENCES = (
    Path("/usr/share/common-licenses/GPL-3"),
    Path(__file__).parent / "text" / "gpl-3.txt",
)
SYSTEM = "You answer questions about the following licence. ChatAnswer briefly.\n\n"
TOPICS = (
    "Who wrote this licence?",
    "What is its version number?",
    "In which year was it published?",
    "May I sell copies of the program?",
    "May I change the program for myself?",
    "What does 'copyleft' mean?",
    "What is a 'covered work'?",
    "What does 'to propagate' mean?",
    "What does 'to convey' mean?",
    "What is the 'source code' of a work?",
    "What is 'object code'?",
    "What are 'System Libraries'?",
    "What is the 'Corresponding Source'?",
    "Does the licence come with a warranty?",
    "May others change the licence text?",
    "What does 'free' refer to in 'free software'?",
    "Can patents make the program proprietary?",
    "What must I do when I convey verbatim copies?",
    "Must I mark the files that I changed?",
    "What is an 'aggregate'?",
    "What is a 'User Product'?",
    "What is 'Installation Information'?",
    "Does the licence apply when I only run the program?",
    "What are 'additional permissions'?",
)


@dataclass(frozen=True)
class ChatAnswer:
    """One chat answer: text, token ids, and per token the log-probability and the lead (nats)."""

    text: str
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    leads: tuple[float, ...]


@dataclass(frozen=True)
class Agreement:
    """Agreement of two sets of answers to the same questions.

    `partings` maps the index of an answer to the index of its first differing token; `mean` and
    `largest` are over the differences of log-probabilities (nats) up to there, see `agreement`.
    """

    answers: int
    partings: dict[int, int]
    mean: float
    largest: float

    @property
    def identical(self) -> int:
        return self.answers - len(self.partings)


def licence_prompt(tokenizer: Tokenizer, tokens: int) -> str:
    """The system prompt: the instruction and the first `tokens` tokens of the GPL.

    Raises:
        ValueError: it has not so many.
    """
    text = next(path for path in LICENCES if path.is_file()).read_text()
    offsets = tokenizer.encode(text, add_special_tokens=False).offsets
    if not 1 <= tokens <= len(offsets):
        raise ValueError(f"{tokens:,} tokens asked for: the licence has 1 to {len(offsets):,}")
    return SYSTEM + text[: offsets[tokens - 1][1]]


def questions(count: int) -> list[str]:
    """`count` different short questions."""
    rounds = ("", " Give one example.", " Explain it to a child.", " ChatAnswer in one sentence.")
    asked = [topic + extra for extra in rounds for topic in TOPICS]
    if not 1 <= count <= len(asked):
        raise ValueError(f"--requests is {count}: from 1 to {len(asked)} questions exist")
    return asked[:count]


def asked(count: int, mark: str) -> list[str]:
    """Questions, all different, and different from those with another mark."""
    topics = questions(min(count, 96))
    return [f"{topics[i % len(topics)]} ({mark}, {i})" for i in range(count)]


def parting(first: ChatAnswer, second: ChatAnswer) -> int | None:
    """Index of the first token that differs, one past the shorter answer included; None without."""
    both = min(len(first.tokens), len(second.tokens))
    differ = next((i for i in range(both) if first.tokens[i] != second.tokens[i]), both)
    return None if differ == len(first.tokens) == len(second.tokens) else differ


def lead(first: ChatAnswer, second: ChatAnswer, at: int) -> float:
    """Lead (nats) of the chosen token where two answers part; near 0 for a tie."""
    return (first if at < len(first.leads) else second).leads[at]


def agreement(first: list[ChatAnswer], second: list[ChatAnswer]) -> Agreement:
    """Agreement of answers, pair by pair.

    Up to the parting both models saw the same text, so log-probabilities compare. The token where
    they part counts with its lead: answers that part at once, not by a tie, are far apart.
    """
    partings, differences = {}, []
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        at = parting(a, b)
        same = len(a.tokens) if at is None else at
        pairs = zip(a.logprobs[:same], b.logprobs[:same], strict=True)
        differences += [abs(x - y) for x, y in pairs]
        if at is not None:
            partings[i] = at
            differences.append(lead(a, b, at))
    mean = sum(differences) / max(1, len(differences))
    return Agreement(len(first), partings, mean, max(differences, default=0.0))


def first_ttft(server: Server, system: str, report: Callable[[str], None]) -> float:
    """Seconds until the first content of the first answer under `system` since `server` started.

    The answer is read to its end, so that the prompt is in the prefix cache for what follows.

    Raises:
        RuntimeError: the answer has no content.
    """

    def stream(messages: list[ChatCompletionMessageParam]) -> float:
        seconds = None
        started = time.monotonic()
        for chunk in client.chat.completions.create(
            model=MODEL_NAME, messages=messages, temperature=0, max_completion_tokens=8, stream=True
        ):
            # The chunk that only names the role comes with no content.
            if seconds is None and any(choice.delta.content for choice in chunk.choices):
                seconds = time.monotonic() - started
        if seconds is None:
            raise RuntimeError(f"{server.log.stem} gave the first request an empty answer")
        return seconds

    user: ChatCompletionMessageParam = {"role": "user", "content": "Hello."}
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300
    ) as client:
        # A short request without the system prompt goes first: what the server's Python code does
        # only once (rendering, sampling, streaming) is then done, and servers differ in prefill.
        report("a short one before it")
        stream([user])
        report("waiting for its first token")
        return stream([{"role": "system", "content": system}, user])


async def ask(
    server: Server,
    system: str,
    asked: list[str],
    *,
    at_once: int,
    tokens: int,
    report: Callable[[str], None],
) -> list[ChatAnswer]:
    """Send all questions under `system`, `at_once` at a time."""
    done = 0
    places = asyncio.Semaphore(at_once)

    async def one(client: openai.AsyncOpenAI, question: str) -> ChatAnswer:
        nonlocal done
        async with places:
            reply = await client.chat.completions.create(
                model=MODEL_NAME,
                messages=[
                    {"role": "system", "content": system},
                    {"role": "user", "content": question},
                ],
                temperature=0,
                max_completion_tokens=tokens,
                logprobs=True,
                top_logprobs=2,
                extra_body={"return_tokens_as_token_ids": True},
            )
        done += 1
        report(f"{done} of {len(asked)} answers")
        choice = reply.choices[0]
        steps = (choice.logprobs and choice.logprobs.content) or []
        best = [sorted((top.logprob for top in s.top_logprobs), reverse=True) for s in steps]
        return ChatAnswer(
            text=" ".join((choice.message.content or "").split()),
            tokens=tuple(s.token for s in steps),
            logprobs=tuple(s.logprob for s in steps),
            leads=tuple(first - second for first, second, *_ in best),
        )

    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300
    ) as client:
        report(f"0 of {len(asked)} answers")
        return await asyncio.gather(*(one(client, question) for question in asked))
