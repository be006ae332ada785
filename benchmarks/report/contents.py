"""The sections of the report."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.result_csv import Row
from benchmarks.report import attention_figures, comparison_figures
from benchmarks.report.markdown import Ratio


@dataclass(frozen=True)
class Section:
    """Of the report.

    Attributes:
        name: of the benchmark's CSVs. suffix: of this figure's file. text: what is asked. draw:
            makes the figure and returns the table. ratios: of the same rows. of: rows that it is
            made of; without any there is no section.
    """

    name: str
    title: str
    text: str
    draw: Callable[[list[Row], Path], str]
    ratios: Callable[[list[Row]], list[Ratio]]
    suffix: str = ""
    of: Callable[[Row], bool] = lambda row: True


SECTIONS = (
    Section(
        "serving", "Interactive serving",
        "Chats under one system prompt: real servers side by side, `vllm bench serve` as the "
        "client. Latency over tokens is the RelayAttention paper's normalized latency. The lower "
        "the rate, the fewer requests run at once, and the less there is to share.",
        comparison_figures.serving, comparison_figures.serving_ratios,
    ),
    Section(
        "serving-prefix_repetition", "Interactive serving of repeated prefixes",
        "The client's `prefix_repetition` dataset: prefixes are new in every round, so that what "
        "they cost once is in it.",
        comparison_figures.serving, comparison_figures.serving_ratios,
    ),
    Section(
        "serving-random", "Interactive serving of random prompts",
        "The client's `random` dataset with a prefix, new in every round.",
        comparison_figures.serving, comparison_figures.serving_ratios,
    ),
    Section(
        "system-kv", "Starting with the system prompt in the cache",
        "`vllm serve` with relay, started with a KV file of the system prompt and without one: the "
        "first request after a start, and one more after other prompts went round the whole KV "
        "cache. `make bench` does not measure it.",
        comparison_figures.system_kv, lambda rows: [],
    ),
    Section(
        "throughput", "Non-interactive throughput",
        "All requests at once, by the length of the system prompt. Relayed steps are those that "
        "the cost model chose; where there are none, relay runs vLLM's own attention, and a ratio "
        "is the machine's noise.",
        comparison_figures.throughput, comparison_figures.case_ratios,
    ),
    Section(
        "fewshot", "Few-shot prompts of many subjects",
        "In shape as table 3 of the RelayAttention paper: the questions on a subject share its "
        "examples. Prefix caches are emptied before every round; KV files, of all that is shared, "
        "are made beforehand, which is not in the time. Without examples no file holds anything.",
        comparison_figures.fewshot, comparison_figures.case_ratios,
    ),
    Section(
        "needles", "Questions about one document",
        "As Hydragen's document task: facts are planted in a text, and sentences are to be ended "
        "with them; `right` counts the answers that name the word. Without attention none is; its "
        "time is the least that any attention kernel could reach.",
        comparison_figures.needles, comparison_figures.case_ratios,
    ),
    Section(
        "tree", "One level of sharing and two",
        "Examples for all, problems for some, samples of each problem. Ranges that overlap do not "
        "tell one level from two.",
        comparison_figures.tree, comparison_figures.case_ratios,
    ),
    Section(
        "decode", "Decode steps",
        "Engines in turns. The lines below are of an engine that skips attention, and of one that "
        "would attend to the prefix, and to nothing else, at the rate of a matrix product: what is "
        "between them and relay is all that is left to gain. Steps that nothing is shared in run "
        "vLLM's own attention; relayed ones attend to contexts with our kernel, which is faster "
        "than vLLM's: where prefixes are short or contexts long, part of the gain is that (see the "
        "next two sections).",
        comparison_figures.decode, comparison_figures.decode_ratios, "",
        lambda row: "no_attention_step_ms" in row,
    ),
    Section(
        "attention", "Attention of a whole step, and the theory",
        "vLLM's attention and relay's on the same step, always relayed, with caches flushed before "
        "every call or warm from the same call; packed copies of the prefix are made already. With "
        "short prefixes part of the gain is that our kernels are faster than vLLM's: `by sharing` "
        "is against our own kernels with nothing shared, and that is what eq. 10 of the "
        "RelayAttention paper predicts. It counts reads of memory and nothing else; where "
        "arithmetic takes the time, as with long prefixes on a CPU, less can be had.",
        attention_figures.theory, attention_figures.theory_ratios, "-theory",
        lambda row: row.get("part") == "step" and "unshared_ms" in row,
    ),
    Section(
        "attention", "Attention of one layer",
        "Kernels beside what the machine can do at most, on one thread: one prefix for all "
        "requests, or contexts that each has for itself.",
        attention_figures.kernels,
        lambda rows: [], "", lambda row: row.get("part") != "step" and "ms_min" in row,
    ),
)  # fmt: skip
