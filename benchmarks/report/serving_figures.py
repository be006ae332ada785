"""Figures, tables and speed-ups of interactive serving."""

import math
import statistics
from pathlib import Path

from benchmarks.harness.result_csv import Row
from benchmarks.report.figure_style import (
    COLOURS,
    by_system,
    finish,
    label,
    medians,
    panels_of,
)
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
    whats = {"normalized_s": "latency per token, s", "tokens_per_s": "tokens per second"}
    figure, panels = panels_of(len(whats) if swept else 1)
    for axes, (name, what) in zip(panels, whats.items(), strict=False):
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
    if "predicted_attention" in row:
        text += (
            "\nRequests at once (means), and the speed-up of attention that `explain` predicts:\n\n"
        )
        text += _predicted(rows)
    held = [f"- {line}" for line in gains.held_lines(rows, row["bound_s"])]
    if held:
        seconds = statistics.median(row["requests"] / row["rate"] for row in swept)
        text += (
            f"\nHighest rate of the sweep, each held for about {seconds:.0f} s, with latency per "
            "token\n\n"
        )
    return text + "\n".join([*held, ""])


def distributions(rows: list[Row], path: Path) -> str:
    """Shares of the requests within a latency, at the highest rate that all systems were sent."""
    systems = by_system(rows)
    rates = [{row["rate"] for row in mine} for mine in systems.values()]
    rate = max(set.intersection(*rates))
    figure, panels = panels_of(2)
    for axes, name, title in zip(panels, ("ttft", "tpot"), ("first token", "token"), strict=True):
        axes.set_title(
            f"{gains.rate_text(rate, ' requests/s')}: time per {title}", fontsize="medium"
        )
        axes.set_xlabel("seconds (medians of rounds)")
        for key, mine in systems.items():
            mine = [row for row in mine if row["rate"] == rate]
            of = [[row[f"{name}_p{x}_s"] for row in mine] for x in PERCENTILES]
            axes.plot(
                [statistics.median(x) for x in of], PERCENTILES, marker="o", color=COLOURS[key],
                label=label(key) if name == "ttft" else None,
            )  # fmt: skip
    panels[0].set_ylabel("% of the requests")
    finish(figure, panels[0], path)
    shown = (50, 90, 99)
    lines = []
    for at in dict.fromkeys(row["rate"] for row in rows):
        for key, mine in by_system(row for row in rows if row["rate"] == at).items():
            ttft, tpot = (
                [statistics.median(row[f"{name}_p{x}_s"] for row in mine) for x in shown]
                for name in ("ttft", "tpot")
            )
            times = [*(f"{x:.3f} s" for x in ttft), *(f"{1e3 * x:.1f} ms" for x in tpot)]
            lines.append([gains.rate_text(at), label(key), *times])
    names = (f"{name} p{x}" for name in ("TTFT", "TPOT") for x in shown)
    return table(["requests/s", "system", *names], lines)


def _predicted(rows: list[Row]) -> str:
    """Per rate: requests at once of each system, and the predictions of the rounds."""
    lines = []
    for rate in dict.fromkeys(row["rate"] for row in rows):
        mine = by_system([row for row in rows if row["rate"] == rate])
        running = [statistics.median(x["running"] for x in of) for of in mine.values()]
        predicted = [row["predicted_attention"] for of in mine.values() for row in of]
        lines.append(
            [
                gains.rate_text(rate),
                " / ".join(f"{x:.1f}" for x in running),
                f"{min(predicted):.2f} to {max(predicted):.2f}",
            ]
        )
    systems = " / ".join(map(label, by_system(rows)))
    return table(["requests/s", f"at once, {systems}", "predicted"], lines)


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
