"""Figures, tables and speed-ups of interactive serving."""

import math
import statistics
from pathlib import Path

from benchmarks.harness.result_csv import Row
from benchmarks.report.figure_style import COLOURS, by_system, finish, label, medians, panels_of
from benchmarks.report.markdown import Ratio, table
from vllm_relay.serving import gains
from vllm_relay.serving.comparison import PERCENTILES
from vllm_relay.serving.systems import SYSTEMS


def title_of(row: Row) -> str:
    if row["prefix_tokens"] == "":
        return str(row["dataset"])
    return f"{row['dataset']}: a prefix of {row['prefix_tokens']:,} tokens"


def draw(rows: list[Row], path: Path) -> str:
    row = rows[0]
    title = title_of(row)
    swept = [x for x in rows if not math.isinf(x["rate"])]
    shown = {"normalized_s": "latency per token, s", "tokens_per_s": "tokens per second"}
    figure, panels = panels_of(len(shown) if swept else 1)
    for axes, (name, what) in zip(panels, shown.items(), strict=False):
        axes.set_title(title, fontsize="medium")
        axes.set_ylabel(f"{what} (median of rounds; min to max)")
        for place, (key, mine) in enumerate(by_system(swept or rows).items()):
            rates = sorted({row["rate"] for row in mine})
            of = [[row[name] for row in mine if row["rate"] == rate] for rate in rates]
            middle, bounds = medians(of)
            style = {"capsize": 3, "color": COLOURS[key]}
            style["label"] = label(key) if axes is panels[0] else None
            if swept:
                axes.errorbar(rates, middle, bounds, marker="o", **style)
            else:  # all at once
                axes.bar([place], middle, yerr=bounds, **style)
                axes.set_xticks([])
        if swept:
            axes.set_xlabel("requests per second")
            axes.set_xticks(sorted({row["rate"] for row in swept}))
    if swept:
        panels[0].axhline(row["bound_s"], color="0.8", linewidth=0.8, zorder=0)
        panels[1].set_ylim(bottom=0)
    finish(figure, panels[0], path, log=bool(swept))
    cells = [gains.cells(gain) for gain in gains.summary(rows)]
    text = table(list(cells[0]), [list(line.values()) for line in cells])
    text += (
        f"\n{gains.legend(rows)} Systems that miss the bound twofold are skipped at higher rates.\n"
    )
    text += f"\nLatencies of the requests of a round, medians of rounds:\n\n{_latencies(rows)}"
    if "predicted_attention" in row:
        text += (
            f"\n{row['left_out']:.0%} of the trace's requests were longer than the context. Mean "
            "requests at once, and the speed-up of decode attention that `vllm-relay explain` "
            f"predicts with vLLM's:\n\n{_predicted(rows)}"
        )
    held = [f"- {line}" for line in gains.held_lines(rows, row["bound_s"])]
    if held:
        sizes = {row["requests"] for row in swept}
        sent = " to ".join(str(x) for x in sorted({min(sizes), max(sizes)}))
        text += f"\nHighest rate of the sweep, {sent} requests each, with latency per token\n\n"
    return text + "\n".join([*held, ""])


def distributions(rows: list[Row], path: Path) -> str:
    """Cumulative distributions of latencies at the highest rate that all systems were sent."""
    systems = by_system(rows)
    rates = set.intersection(*({row["rate"] for row in mine} for mine in systems.values()))
    rate = max(rates - {math.inf}, default=math.inf)
    figure, panels = panels_of(2)
    titles = {"ttft": "time to the first token", "tpot": "time per token"}
    for axes, (name, title) in zip(panels, titles.items(), strict=True):
        where = gains.rate_text(rate, " requests/s")
        axes.set_title(f"{where}: {title}", fontsize="medium")
        axes.set_xlabel("seconds (medians of rounds)")
        axes.set_ylabel("% of the requests")
        for key, mine in systems.items():
            at_rate = [row for row in mine if row["rate"] == rate]
            of = [[row[f"{name}_p{x}_s"] for row in at_rate] for x in PERCENTILES]
            axes.plot(
                [statistics.median(x) for x in of], PERCENTILES, marker="o", color=COLOURS[key],
                label=label(key) if axes is panels[0] else None,
            )  # fmt: skip
        axes.set_ylim(0, 103)
    finish(figure, panels[0], path)
    return ""


def _latencies(rows: list[Row]) -> str:
    """50th, 90th and 99th percentiles of each system's latencies, as far as the CSV has them."""
    shown = [x for x in (50, 90, 99) if f"ttft_p{x}_s" in rows[0]]
    lines = []
    for rate in dict.fromkeys(row["rate"] for row in rows):
        for key, mine in by_system(row for row in rows if row["rate"] == rate).items():
            ttft, tpot = (
                [statistics.median(row[f"{name}_p{x}_s"] for row in mine) for x in shown]
                for name in ("ttft", "tpot")
            )
            times = [*(f"{x:.3f} s" for x in ttft), *(f"{1e3 * x:.1f} ms" for x in tpot)]
            lines.append([gains.rate_text(rate), label(key), *times])
    names = (f"{name} p{x}" for name in ("TTFT", "TPOT") for x in shown)
    return table(["requests/s", "system", *names], lines)


def _predicted(rows: list[Row]) -> str:
    """Mean requests at once of each system and rate, and the predictions of the rounds."""
    systems = by_system(rows)
    lines = []
    for rate in dict.fromkeys(row["rate"] for row in rows):
        of = [[row["running"] for row in x if row["rate"] == rate] for x in systems.values()]
        predicted = [row["predicted_attention"] for row in rows if row["rate"] == rate]
        lines.append(
            [
                gains.rate_text(rate),
                *(f"{statistics.median(x):.1f}" if x else "" for x in of),
                f"{min(predicted):.2f} to {max(predicted):.2f}",
            ]
        )
    names = (f"at once, {label(key)}" for key in systems)
    return table(["requests/s", *names, "predicted speed-up"], lines)


def ratios(rows: list[Row]) -> list[Ratio]:
    return [
        Ratio(
            gains.rate_text(gain["rate"], " requests/s"),
            "",
            label(gain["system"]),
            gain["times_latency"],
            gain["times_latency_min"],
            gain["times_latency_max"],
        )
        for gain in gains.summary(rows)
        if SYSTEMS[gain["system"]].relay
    ]
