"""Figures, tables and speed-ups of `bench_attention.py`."""

from pathlib import Path

from benchmarks.harness.result_csv import Row, read
from benchmarks.harness.roofline import theoretical_speed_up
from benchmarks.report.figure_style import axes_of, close, finish, panels_of, spread
from benchmarks.report.markdown import Ratio, kind_of, table
from benchmarks.report.published import PUBLISHED


def draw_theory(rows: list[Row], path: Path) -> None:
    """Measured and predicted speed-up of attention, and what the authors measured."""
    row = rows[0]
    figure, axes = axes_of(
        f"{row['requests']} requests with {row['context_tokens']} tokens of context each; ours: "
        f"{row['query_heads']}/{row['kv_heads']} heads of {row['head_size']}",
        "tokens of the prefix",
        "speed-up (median; min to max)",
    )
    axes.plot(
        [x["prefix_tokens"] for x in rows if x["caches"] == row["caches"]],
        [x["eq_10"] for x in rows if x["caches"] == row["caches"]],
        color="black", linestyle=":", label="eq. 10 (reads alone)",
    )  # fmt: skip
    longest = max(x["prefix_tokens"] for x in rows)
    theirs = [
        x for x in read(PUBLISHED, text=())
        if x["of"] == "attention of one layer" and x["prefix_tokens"] <= longest
    ]  # fmt: skip
    axes.plot(
        [x["prefix_tokens"] for x in theirs],
        [x["vllm"] / x["shared_attention"] for x in theirs],
        color="0.55", marker="s", label=f"the authors, {theirs[0]['hardware']}",
    )  # fmt: skip
    for caches in dict.fromkeys(x["caches"] for x in rows):
        mine = [x for x in rows if x["caches"] == caches]
        axes.errorbar(
            [x["prefix_tokens"] for x in mine],
            [x["times_as_fast_as_vllm"] for x in mine],
            spread(mine, "times_as_fast_as_vllm", "times_min", "times_max"),
            marker="o", capsize=3, label=f"relay over vLLM, {caches}",
        )  # fmt: skip
    mine = [x for x in rows if x["caches"] == row["caches"]]
    axes.errorbar(
        [x["prefix_tokens"] for x in mine],
        [x["by_sharing"] for x in mine],
        spread(mine, "by_sharing", "by_sharing_min", "by_sharing_max"),
        marker="^", capsize=3, label=f"by sharing alone, {row['caches']}",
    )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.6g}")
    axes.axhline(1, color="0.8", linewidth=0.8, zorder=0)
    finish(figure, axes, path, log=True)


def draw_kernels(rows: list[Row], path: Path) -> None:
    """The prefix against the matrix product, contexts against reading, on the fewest threads."""
    least = min(row["threads"] for row in rows)
    parts = [
        (unit, ceiling, name, of)
        for part, unit, ceiling, name in (
            ("prefix", "gflop_s", "gemm_gflop_s", "GFLOP/s"),
            ("contexts", "gb_s", "read_gb_s", "GB/s"),
        )
        if (of := [row for row in rows if row["part"] == part and row["threads"] == least])
    ]
    figure, panels = panels_of(len(parts))
    for axes, (unit, ceiling, name, of_part) in zip(panels, parts, strict=True):
        case = of_part[0]["case"]
        shown = [row for row in of_part if row["case"] == case]
        ways = list(dict.fromkeys(row["way"] for row in shown))
        shapes = list(
            dict.fromkeys((r["query_heads"], r["kv_heads"], r["head_size"]) for r in shown)
        )
        width = 0.8 / len(ways)
        for index, way in enumerate(ways):
            mine = [row for row in shown if row["way"] == way]
            places = [i + (index - (len(ways) - 1) / 2) * width for i in range(len(mine))]
            # a rate is a constant over the time
            bounds = [
                [max(0.0, r[unit] * (1 - r["ms"] / r["ms_max"])) for r in mine],
                [max(0.0, r[unit] * (r["ms"] / r["ms_min"] - 1)) for r in mine],
            ]
            axes.bar(places, [r[unit] for r in mine], width, yerr=bounds, capsize=2, label=way)
        most = [next(r[ceiling] for r in shown if r["query_heads"] == s[0]) for s in shapes]
        for i, value in enumerate(most):
            axes.plot(
                [i - 0.45, i + 0.45], [value] * 2, color="black", linewidth=1,
                label=("matrix product" if unit == "gflop_s" else "reading") if not i else None,
            )  # fmt: skip
        axes.set_xticks(range(len(shapes)), [f"{a}/{b} heads of {c}" for a, b, c in shapes])
        axes.set_title(f"{of_part[0]['part'].capitalize()}, {case} tokens", fontsize="medium")
        axes.set_ylabel(f"{name} (median; min to max)")
        axes.set_ylim(0, 1.45 * max(most))
        axes.legend(frameon=False, fontsize="small", ncols=2)
    figure.savefig(path, dpi=150)
    close(figure)


def kernels(rows: list[Row], path: Path) -> str:
    draw_kernels(rows, path)
    least = min(row["threads"] for row in rows)
    return table(
        [
            "heads",
            "of",
            "tokens",
            "way",
            "ms",
            "GFLOP/s",
            "GB/s",
            "of the matrix product",
            "of reading",
        ],
        (
            [
                f"{row['query_heads']}/{row['kv_heads']} x {row['head_size']}",
                row["part"],
                row["case"],
                row["way"],
                f"{row['ms']:.2f}",
                f"{row['gflop_s']:.0f}",
                f"{row['gb_s']:.1f}",
                f"{row['of_gemm']:.0%}",
                f"{row['of_read']:.0%}",
            ]
            for row in rows
            if row["threads"] == least
        ),
    )


# Columns that eq. 10 is of.
STEP = ("requests", "prefix_tokens", "context_tokens")


def theory(rows: list[Row], path: Path) -> str:
    draw_theory(rows, path)
    return table(
        ["prefix tokens", "caches", "vLLM, ms", "our kernels, nothing shared, ms", "relay, ms",
         "times vLLM", "least to most", "by sharing", "eq. 10"],
        (
            [
                f"{row['prefix_tokens']:,}",
                row["caches"],
                f"{row['stock_ms']:.2f}",
                f"{row['unshared_ms']:.2f}",
                f"{row['ms']:.2f}",
                f"{row['times_as_fast_as_vllm']:.2f}",
                f"{row['times_min']:.2f} to {row['times_max']:.2f}",
                f"{row['by_sharing']:.2f}",
                f"{theoretical_speed_up(*(row[x] for x in STEP)):.2f}",
            ]
            for row in rows
        ),
    )  # fmt: skip


def theory_ratios(rows: list[Row]) -> list[Ratio]:
    return [
        Ratio(
            f"{row['requests']} requests, {row['prefix_tokens']:,} shared, "
            f"{row['context_tokens']} own, caches {row['caches']}",
            kind_of(row),
            "relay, always",
            row["times_as_fast_as_vllm"],
            row["times_min"],
            row["times_max"],
        )
        for row in rows
    ]
