"""Measurements published in the papers (`published.csv`), as Markdown for the report."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.result_csv import Row, read
from benchmarks.harness.roofline import theoretical_speed_up
from benchmarks.report.markdown import shown, table

# The papers' published measurements.
PUBLISHED = Path(__file__).with_name("published.csv")
# Figure -> engine version of the authors, measurements beside it.
BESIDE = {
    "serving": ("vLLM 0.2.6", "ShareGPT, Poisson arrivals"),
    "throughput": (
        "vLLM 0.2.6",
        "ShareGPT, all at once",
        "prompts of 64 tokens, answers of 128, all at once",
        "prompts of 128 tokens, answers of 256, all at once",
        "prompts of 256 tokens, answers of 512, all at once",
    ),
    "decode": ("vLLM 0.2.7", "decode, Hydragen"),
    "attention-theory": ("vLLM 0.2.6", "attention of one layer"),
}


def beside(figure: str) -> str:
    """Markdown of the published measurements for a figure; "" without any."""
    if figure not in BESIDE:
        return ""
    version, *measurements = BESIDE[figure]
    rows = read(PUBLISHED, text=())
    return "".join(
        measurement([row for row in rows if row["of"] == of], version) for of in measurements
    )


def digits(values: Sequence[float]) -> int:
    """Significant digits, two or three, that a ratio of such values can have."""
    least = min(len(str(value).replace(".", "").strip("0")) for value in values)
    return min(3, max(2, least))


def measurement(rows: list[Row], version: str) -> str:
    """Markdown table of one measurement; with eq. 10 where contexts are known."""
    unit, model = rows[0]["unit"], rows[0]["model"]
    used = [
        x for x in ("vllm", "vllm_prefix_sharing", "shared_attention", "no_attention")
        if any(row[x] != "" for row in rows)
    ]  # fmt: skip
    rates = rows[0]["requests_per_s"] != ""
    headings = ["hardware", "requests", *(["requests/s"] if rates else []), "prefix tokens"]
    headings += [f"{x.replace('_', ' ').replace('vllm', 'vLLM')}, {unit}" for x in used]
    headings.append("times the better vLLM")
    theory = rows[0]["context_tokens"] != ""
    less_is_better = unit in ("us", "ms per token")
    cells = []
    for row in rows:
        of_vllm = [row[x] for x in ("vllm", "vllm_prefix_sharing") if row[x] != ""]
        ours = row["shared_attention"]
        times = min(of_vllm) / ours if less_is_better else ours / max(of_vllm)
        line = [row["hardware"], shown(row["requests"])]
        line += [row["requests_per_s"]] if rates else []
        line += [shown(row["prefix_tokens"]), *(shown(row[x]) for x in used)]
        line.append(f"{times:.{digits([*of_vllm, ours])}g}")
        if theory:
            given = (row["requests"], row["prefix_tokens"], row["context_tokens"])
            line.append(f"{theoretical_speed_up(*given):.2f}")
        cells.append(line)
    sources = ", ".join(dict.fromkeys(row["source"] for row in rows))
    with_what = ", ".join(filter(None, [model, version]))
    text = table(headings + (["eq. 10"] if theory else []), cells)
    return f"The papers' authors, {rows[0]['of']} ({with_what}):\n\n{text}\nSource: {sources}.\n\n"
