"""Figures, tables and speed-ups of decode steps."""

import statistics
from pathlib import Path

from benchmarks.harness.result_csv import Row
from benchmarks.report.figure_style import COLOURS, axes_of, finish, label, spread
from benchmarks.report.markdown import Ratio, kind_of, table


def decode(rows: list[Row], path: Path) -> str:
    """Step time by prefix length, with the ceilings."""
    usual = (rows[0]["requests"], rows[0]["own_tokens"])
    swept = [row for row in rows if (row["requests"], row["own_tokens"]) == usual]
    title = f"{usual[0]} requests with {usual[1]} tokens each"
    _sweep(swept, "shared_tokens", "tokens of the shared prefix", title, path)
    return _table(rows)


def requests(rows: list[Row], path: Path) -> str:
    """Step time by requests at once, with the ceilings."""
    title = f"{rows[0]['shared_tokens']:,} tokens shared, {rows[0]['own_tokens']} of each request"
    _sweep(rows, "requests", "requests at once", title, path)
    return _table(rows)


def _sweep(rows: list[Row], x: str, x_label: str, title: str, path: Path) -> None:
    rows = sorted(rows, key=lambda row: row[x])
    row, at = rows[0], [row[x] for row in rows]
    figure, axes = axes_of(
        f"{title}, {row['layers']} layers, {row['query_heads']}/{row['kv_heads']} heads of "
        f"{row['head_size']}",
        x_label,
        "milliseconds per decode step (median; min to max)",
    )
    for key in ("stock", "relay"):
        name = f"{key}_step_ms"
        axes.errorbar(
            at,
            [row[name] for row in rows],
            spread(rows, name, f"{name}_min", f"{name}_max"),
            marker="o",
            capsize=3,
            label=label(key),
            color=COLOURS[key],
        )
    bare = [row["no_attention_step_ms"] for row in rows]
    axes.plot(at, bare, color="0.6", linestyle="--", label=label("no-attention"))
    least = [x["no_attention_step_ms"] + x["prefix_ms_at_gemm_rate"] for x in rows]
    axes.plot(
        at, least, color="black", linestyle=":",
        label="no attention + prefix at matrix-product rate",
    )  # fmt: skip
    axes.xaxis.set_major_formatter("{x:,.0f}")
    finish(figure, axes, path)


def heads(rows: list[Row], path: Path) -> str:
    """Step time by the query heads and KV heads of models, most KV heads first."""
    rows = sorted(rows, key=lambda row: (-row["kv_heads"], -row["shared_tokens"]))
    shared = rows[0]["shared_tokens"]
    shown = [row for row in rows if row["shared_tokens"] == shared]
    row = shown[0]
    title = (
        f"{row['requests']} requests under {shared:,} tokens with {row['own_tokens']} tokens each, "
        f"{row['layers']} layers, heads of {row['head_size']}"
    )
    names = [f"{row['query_heads']}/{row['kv_heads']}" for row in shown]
    _bars(shown, names, title, "query heads/KV heads of the model", path)
    return _table(rows)


def unshared(rows: list[Row], path: Path) -> str:
    """Step time of a model by requests and their tokens."""
    title = f"{rows[0]['model']}, nothing shared"
    names = [f"{row['requests']} x {row['own_tokens']:,}" for row in rows]
    _bars(rows, names, title, "requests x tokens of each", path)
    return _table(rows)


def _bars(shown: list[Row], names: list[str], title: str, x_label: str, path: Path) -> None:
    figure, axes = axes_of(title, x_label, "milliseconds per decode step (median; min to max)")
    at = range(len(shown))
    for number, key in enumerate(("stock", "relay")):
        name = f"{key}_step_ms"
        axes.bar(
            [x + 0.4 * (number - 0.5) for x in at],
            [row[name] for row in shown],
            0.38,
            yerr=spread(shown, name, f"{name}_min", f"{name}_max"),
            capsize=3,
            label=label(key),
            color=COLOURS[key],
        )
    bare = [row["no_attention_step_ms"] for row in shown]
    axes.hlines(
        bare, [x - 0.4 for x in at], [x + 0.4 for x in at],
        colors="black", linestyles="--", label=label("no-attention"),
    )  # fmt: skip
    axes.set_xticks(at, names)
    finish(figure, axes, path)


def _table(rows: list[Row]) -> str:
    prompts = "prefill_time_ratio" in rows[0]
    return table(
        ["heads", "requests", "shared tokens", "own tokens", "vLLM, tokens/s", "relay, tokens/s",
         "no attention, tokens/s", "times vLLM", "least to most", "steps relayed", "logprob rms",
         *(["time of the prompts, vLLM's = 1"] if prompts else [])],
        (
            [
                f"{row['query_heads']}/{row['kv_heads']}",
                row["requests"],
                f"{row['shared_tokens']:,}",
                f"{row['own_tokens']:,}",
                f"{row['stock_tok_s']:,.1f}",
                f"{row['relay_tok_s']:,.1f}",
                f"{row['no_attention_tok_s']:,.1f}",
                f"{row['ratio']:.2f}",
                f"{row['ratio_min']:.2f} to {row['ratio_max']:.2f}",
                row["steps_relayed"],
                f"{row['logprob_rms']:.4f}",
                *([f"{row['prefill_time_ratio']:.2f}"] if prompts else []),
            ]
            for row in rows
        ),
    )  # fmt: skip


def decode_ratios(rows: list[Row]) -> list[Ratio]:
    return [
        Ratio(
            f"{row['query_heads']}/{row['kv_heads']} heads, requests {row['requests']}, shared "
            f"tokens {row['shared_tokens']:,}, own tokens {row['own_tokens']:,}",
            kind_of(row),
            "relay",
            row["ratio"],
            row["ratio_min"],
            row["ratio_max"],
        )
        for row in rows
    ]


def prediction(rows: list[Row], path: Path) -> str:
    """Speed-ups of decode attention, measured over predicted."""
    figure, axes = axes_of(
        f"{len(rows)} workloads", "predicted speed-up of attention", "measured (median; min to max)"
    )
    names = ("query_heads", "kv_heads", "head_size")
    for heads in dict.fromkeys(tuple(row[name] for name in names) for row in rows):
        mine = [row for row in rows if tuple(row[name] for name in names) == heads]
        axes.errorbar(
            [row["predicted_speedup"] for row in mine],
            [row["attention_speedup"] for row in mine],
            spread(mine, *(f"attention_speedup{end}" for end in ("", "_min", "_max"))),
            fmt="o",
            capsize=2,
            label=f"{heads[0]}/{heads[1]} heads of {heads[2]}",
        )
    most = max(max(row["predicted_speedup"], row["attention_speedup"]) for row in rows)
    axes.plot([1, most], [1, most], color="0.6", linestyle="--", label="equal")
    finish(figure, axes, path)
    return table(
        ["heads", "requests", "prefixes", "shared tokens", "own tokens", "attention, vLLM, ms",
         "attention, relay, ms", "planning in it, ms", "times vLLM", "least to most", "predicted",
         "off by"],
        (
            [
                f"{row['query_heads']}/{row['kv_heads']}",
                row["requests"],
                row["prefixes"],
                f"{row['shared_tokens']:,}",
                f"{row['own_tokens']:,}",
                *(
                    f"{row[f'{key}_step_ms'] - row['no_attention_step_ms']:.1f}"
                    for key in ("stock", "relay")
                ),
                f"{row['planning_ms']:.1f}",
                f"{row['attention_speedup']:.2f}",
                f"{row['attention_speedup_min']:.2f} to {row['attention_speedup_max']:.2f}",
                f"{row['predicted_speedup']:.2f}",
                f"{row['error']:+.0%}",
            ]
            for row in rows
        ),
    ) + (
        f"\n{prediction_error(rows)} "
        f"From {'; '.join(dict.fromkeys(row['costs'] for row in rows))}.\n"
    )  # fmt: skip


def prediction_error(rows: list[Row]) -> str:
    errors = [abs(row["error"]) for row in rows]
    return (
        f"Predicted speed-ups of {len(rows)} workloads are off by {statistics.median(errors):.0%} "
        f"(median), {max(errors):.0%} at most."
    )
