"""Figures, tables and speed-ups of `bench_attention.py`."""

from pathlib import Path

from benchmarks.harness.result_csv import Row, read
from benchmarks.harness.roofline import Machine, theoretical_speed_up
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


def draw_roofline(rows: list[Row], path: Path) -> None:
    """Each case's rate by operations per byte of KV, under the machine's two measured ceilings.

    On the fewest threads, a panel for each head shape.
    """
    least = min(row["threads"] for row in rows)
    rows = [row for row in rows if row["threads"] == least]
    shapes = list(dict.fromkeys((r["query_heads"], r["kv_heads"], r["head_size"]) for r in rows))
    colours = {"vLLM": "0.55", "PyTorch": "C3", "ours": "C0", "ours, packed": "C2"}
    figure, panels = panels_of(len(shapes))
    for axes, shape in zip(panels, shapes, strict=True):
        mine = [r for r in rows if (r["query_heads"], r["kv_heads"], r["head_size"]) == shape]
        intensity = {row["case"]: row["gflop_s"] / row["gb_s"] for row in mine}
        gemm, read = (max(row[x] for row in mine) for x in ("gemm_gflop_s", "read_gb_s"))
        lowest, highest = min(intensity.values()) / 2, max(intensity.values()) * 2
        corner = gemm / read
        axes.plot(
            [lowest, corner, highest],
            [lowest * read, gemm, gemm],
            color="black", linewidth=1, label="reading, matrix product",
        )  # fmt: skip
        for name, colour in colours.items():
            of_way = [r for r in mine if max(filter(r["way"].startswith, colours)) == name]
            axes.scatter(
                [intensity[row["case"]] for row in of_way],
                [row["gflop_s"] for row in of_way],
                s=22, color=colour, label=name, zorder=3,
            )  # fmt: skip
        for number, case in enumerate(sorted(intensity, key=lambda case: intensity[case])):
            axes.axvline(intensity[case], color="0.9", linewidth=0.8, zorder=0)
            axes.annotate(
                case, (intensity[case], 1.4 * gemm * 1.5 ** (number % 4)),
                fontsize="xx-small", ha="center",
            )  # fmt: skip
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(lowest, highest)
        axes.set_ylim(top=6.5 * gemm)
        axes.set_title("{}/{} heads of {}".format(*shape), fontsize="medium")
        axes.set_xlabel("operations per byte of KV")
        axes.set_ylabel("GFLOP/s (median)")
        axes.legend(frameon=False, fontsize="x-small", loc="lower right")
    figure.savefig(path, dpi=150)
    close(figure)


def kernels(rows: list[Row], path: Path) -> str:
    draw_roofline(rows, path)
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


def best_kernels(rows: list[Row]) -> str:
    """The highest rates of our kernels, as parts of the machine's ceilings."""
    least = min(row["threads"] for row in rows)
    ours = [row for row in rows if row["way"].startswith("ours") and row["threads"] == least]
    prefix, contexts = (
        max((row[of] for row in ours if row["part"] == part), default=0.0)
        for part, of in (("prefix", "of_gemm"), ("contexts", "of_read"))
    )
    return (
        f"System attention reaches {prefix:.0%} of the matrix product's rate, context attention "
        f"reads at {contexts:.0%} of the memory's."
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


BATCHES, OWN, PREFIX = (1, 2, 4, 8, 16, 32, 64, 128), (64, 512), 8192


def machines_of(rows: list[Row]) -> dict[str, Machine]:
    """Ceilings by head shape, of the fewest threads."""
    least = min(row["threads"] for row in rows)
    found = {}
    for row in rows:
        query, kv, size = shape = row["query_heads"], row["kv_heads"], row["head_size"]
        if row["threads"] == least:
            found["{}/{} heads of {}".format(*shape)] = Machine(
                gemm=row["gemm_gflop_s"] * 1e9,
                read=row["read_gb_s"] * 1e9,
                query_heads=query,
                kv_heads=kv,
                head_size=size,
            )
    return found


def bounds(rows: list[Row], path: Path) -> str:
    """Speed-ups that eq. 10 and the machine's arithmetic allow, by batch and context."""
    machines = machines_of(rows)
    figure, panels = panels_of(len(machines))
    for axes, (shape, machine) in zip(panels, machines.items(), strict=True):
        for number, own in enumerate(OWN):
            theirs = [theoretical_speed_up(batch, PREFIX, own) for batch in BATCHES]
            ours = [machine.most(batch, PREFIX, own) for batch in BATCHES]
            colour = f"C{number}"
            axes.plot(BATCHES, theirs, color=colour, linestyle=":", label=f"eq. 10, {own} own")
            axes.plot(BATCHES, ours, color=colour, marker="o", label=f"with arithmetic, {own} own")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
        axes.set_title(f"{shape}, {PREFIX:,} tokens shared", fontsize="medium")
        axes.set_xlabel("requests")
        axes.set_ylabel("speed-up of attention, at most")
        axes.legend(frameon=False, fontsize="x-small", loc="upper left")
    figure.savefig(path, dpi=150)
    close(figure)
    return table(
        ["heads", "own tokens", "requests", "eq. 10", "with arithmetic"],
        (
            [
                shape,
                f"{own}",
                f"{batch}",
                f"{theoretical_speed_up(batch, PREFIX, own):.2f}",
                f"{machine.most(batch, PREFIX, own):.2f}",
            ]
            for shape, machine in machines.items()
            for own in OWN
            for batch in BATCHES[3::2]
        ),
    )


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
