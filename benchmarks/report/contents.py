"""Sections of the report: titles, introductions, and the functions that draw them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.result_csv import Row
from benchmarks.report import (
    attention_figures,
    comparison_figures,
    decode_figures,
    llama_cpp_figures,
    serving_figures,
)
from benchmarks.report.markdown import Ratio


@dataclass(frozen=True)
class Section:
    """Section of the report.

    Attributes:
        name: of the suite's CSVs. suffix: of the figure's file name. text: introduction.
        draw: writes the figure, returns the Markdown table. ratios: speed-ups in the rows.
        of: selects the section's rows; without any there is no section.
        by: column for each of whose values there is a section of its own.
        learned: a sentence for the findings, beside that of the speed-ups.
    """

    name: str
    title: str
    text: str
    draw: Callable[[list[Row], Path], str]
    ratios: Callable[[list[Row]], list[Ratio]]
    suffix: str = ""
    of: Callable[[Row], bool] = lambda row: True
    by: str = ""
    learned: Callable[[list[Row]], str] = lambda rows: ""


SECTIONS = (
    Section(
        "serving", "Interactive serving",
        "Chats under one system prompt: real servers side by side, `vllm bench serve` as the "
        "client. Latency per token is the RelayAttention paper's normalized latency. At lower "
        "rates fewer requests run at once, so there is less to share.",
        serving_figures.draw, serving_figures.ratios, by="prefix_tokens",
    ),
    Section(
        "serving", "Latencies of interactive serving",
        "Cumulative distributions over the requests of a round: time to the first token, and per "
        "further token, at the highest rate that every system was sent.",
        serving_figures.distributions, lambda rows: [], "-latencies",
        lambda row: "ttft_p90_s" in row, "prefix_tokens",
    ),
    Section(
        "serving-prefix_repetition", "Interactive serving of repeated prefixes",
        "The client's `prefix_repetition` dataset. Prefixes are new in every round: the times "
        "include their prefill.",
        serving_figures.draw, serving_figures.ratios,
    ),
    Section(
        "serving-random", "Interactive serving of random prompts",
        "The client's `random` dataset with a prefix, new in every round.",
        serving_figures.draw, serving_figures.ratios,
    ),
    *(
        Section(
            f"serving-{name}", f"Interactive serving of a trace: {title}",
            f"Mooncake's {title} trace through the client's `timed_trace` dataset: a block of 512 "
            "tokens is one KV block of 128 here, prompts and answers are shortened alike, and "
            "arrivals are stretched to the rate. Requests longer than the context are left out. "
            "Prompts that the prefix cache does not hold are computed in the measured time, which "
            "is all of the latency of an answer with one token.",
            serving_figures.draw, serving_figures.ratios,
        )
        for name, title in (
            ("conversation_trace", "conversation"), ("synthetic_trace", "synthetic")
        )
    ),
    Section(
        "system_kv", "Starting with the system prompt in the cache",
        "`vllm serve` with relay, started with a KV file of the system prompt and without one: the "
        "first request after a start, and one more after other prompts have evicted the KV cache. "
        "`make bench` leaves it out.",
        comparison_figures.system_kv, lambda rows: [],
        learned=comparison_figures.first_token,
    ),
    Section(
        "throughput", "Non-interactive throughput",
        "All requests at once, by length of the system prompt. The cost model decides which steps "
        "are relayed.",
        comparison_figures.throughput, comparison_figures.case_ratios,
    ),
    Section(
        "fewshot", "Few-shot prompts of many subjects",
        "Table 3 of the RelayAttention paper in shape: the questions on a subject share its "
        "examples. `right` counts the answers that begin with the right letter, `other tokens` "
        "those that part from vLLM's, and the last column the largest lead of the token chosen "
        "there (mean of both systems'): near 0 is a tie. Prefix caches are emptied before every "
        "round. KV files of the shared prefixes are built beforehand, outside the timing; without "
        "examples they are too short to use.",
        comparison_figures.fewshot, comparison_figures.case_ratios,
        learned=comparison_figures.accuracy,
    ),
    Section(
        "needles", "Questions about one document",
        "Hydragen's document task: facts are planted in a text, and each request completes a "
        "sentence with one of them. `right` counts the answers that name the word. The engine "
        "without attention answers none; its time is the lower bound for any attention kernel.",
        comparison_figures.needles, comparison_figures.case_ratios,
        learned=comparison_figures.accuracy,
    ),
    Section(
        "needles-stretched", "Questions about a document longer than the model's context",
        "The same task with more tokens than the model was trained on: its positions are stretched "
        "by YaRN (arXiv 2309.00071). No long text comes with the benchmark: `--text` names one.",
        comparison_figures.needles, comparison_figures.case_ratios,
        learned=comparison_figures.accuracy,
    ),
    Section(
        "completions", "Many completions of a prompt",
        "Samples of each prompt with temperature, as Hydragen draws them and as GRPO does. Equal: "
        "as many requests at once whatever the number of samples. Largest: all samples of some "
        "prompts in a KV cache of fixed size, of which each system runs as many as fit. Answers "
        "are compared in a greedy round before the measured ones. Prompts are new in every round: "
        "times include their prefill.",
        comparison_figures.completions, comparison_figures.case_ratios,
    ),
    Section(
        "llama_cpp", "llama.cpp beside vLLM and relay",
        "What many run on a CPU: llama.cpp's server, built for this machine from the sources that "
        "the PyPI package llama-cpp-python holds, with the same weights in bf16 and the same "
        "prompts, at the settings that are fastest with 8 requests under 1,024 tokens on the most "
        "threads. Chats arrive at once, their system prompt in every server's cache. llama.cpp "
        "holds and reads it once per slot. On the most threads there is no core left for the "
        "client and the servers' other processes. Other kernels round otherwise, so answers are "
        "not compared by log-probabilities: most have to begin with the same word.",
        llama_cpp_figures.draw, lambda rows: [], learned=llama_cpp_figures.who_leads,
    ),
    Section(
        "prepacking", "Prompts of different lengths, packed",
        "Prefill of a batch as Prepacking (arXiv 2404.09529) computes it, without padding: what "
        "vLLM's scheduler does in every step, and `vllm-relay build` for all its prompts. Padded: "
        "every prompt as long as the longest. One by one: each waits for those before it.",
        comparison_figures.prepacking, lambda rows: [], learned=comparison_figures.packed,
    ),
    Section(
        "tree", "One level of sharing and two",
        "Examples shared by all, problems by some, several samples of each problem. Where ranges "
        "overlap, two levels are indistinguishable from one. The authors of Hydragen report 55 % "
        "less time on competitive programming with a second level (arXiv 2402.05099, abstract).",
        comparison_figures.tree, comparison_figures.case_ratios,
    ),
    Section(
        "decode", "Decode steps",
        "Engines interleaved. The two lower lines are ceilings: an engine that skips attention, "
        "and the same plus the prefix at the rate of a matrix product; the distance from relay to "
        "them is what is left to gain. With nothing shared, a speed-up is that of relay's kernel "
        "for contexts over vLLM's.",
        decode_figures.decode, decode_figures.decode_ratios, "",
        lambda row: "no_attention_step_ms" in row,
    ),
    Section(
        "decode-requests", "Decode steps by the size of the batch",
        "The more requests share the prefix, the more reads one read replaces.",
        decode_figures.requests, decode_figures.decode_ratios,
    ),
    Section(
        "decode-heads", "Decode steps of MHA, GQA and MQA",
        "Models that differ in KV heads only. With fewer, vLLM reads less for every request, while "
        "the arithmetic stays the same: less to gain from one read for all. On CPUs without AMX "
        "vLLM's kernel is slower under a long prefix with one KV head than with two.",
        decode_figures.heads, decode_figures.decode_ratios,
    ),
    Section(
        "decode-model", "Decode steps with nothing shared",
        "A real model whose requests have nothing in common: relay's kernels against vLLM's, where "
        "the cost model takes them. Steps without groups do not count as relayed. An "
        "engine that skips attention is the ceiling.",
        decode_figures.unshared, decode_figures.decode_ratios, "",
        lambda row: row["shared_tokens"] == 0,
    ),
    Section(
        "attention", "Attention of a whole step, and the theory",
        "vLLM's attention and relay's on the same step, always relayed, with caches flushed before "
        "every call or warm from the previous one; the prefix is packed beforehand. With short "
        "prefixes part of the speed-up comes from relay's faster kernels. `by sharing` is against "
        "relay's own kernels with nothing shared, which is what eq. 10 of the RelayAttention paper "
        "predicts. Eq. 10 counts memory reads alone; where arithmetic dominates, as with long "
        "prefixes on a CPU, the speed-up is smaller.",
        attention_figures.theory, attention_figures.theory_ratios, "-theory",
        lambda row: row.get("part") == "step" and "unshared_ms" in row,
    ),
    Section(
        "attention", "What reads and arithmetic allow",
        "Eq. 10 of the RelayAttention paper counts reads. On this machine a product of a query "
        "head with a KV token may take longer than the token's read: each part of a step takes as "
        "long as its reads or its arithmetic, at the two rates measured in the same run. Models "
        "with many query heads per KV head then have less to gain.",
        attention_figures.bounds, lambda rows: [], "-bounds",
        lambda row: row.get("part") != "step" and "ms_min" in row,
    ),
    Section(
        "attention", "Attention of one layer",
        "Kernels beside the ceilings of the machine, on one thread: one prefix for all requests, "
        "or a context of its own for each.",
        attention_figures.kernels,
        lambda rows: [], "", lambda row: row.get("part") != "step" and "ms_min" in row,
        learned=attention_figures.best_kernels,
    ),
    Section(
        "prediction", "Prediction and measurement",
        "What `vllm-relay explain` says of the attention of decode steps, with the costs named "
        "below, and what engines take for it: the time of a step less that of an "
        "engine that skips attention. Measured attention includes the planning of steps, "
        "predicted attention does not.",
        decode_figures.prediction, lambda rows: [], learned=decode_figures.prediction_error,
    ),
)  # fmt: skip
