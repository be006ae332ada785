"""What the papers' authors measured: `published.csv`, in words of the report."""

from benchmarks.ceilings import theoretical_speed_up
from benchmarks.reading import PUBLISHED, Row, read
from benchmarks.sections import shown, table


def published() -> str:
    """A table per measurement, in Markdown."""
    rows = read(PUBLISHED, text=())
    return "".join(
        measurement(of, [row for row in rows if row["of"] == of])
        for of in dict.fromkeys(row["of"] for row in rows)
    )


def measurement(of: str, rows: list[Row]) -> str:
    """One of them; where contexts are known, eq. 10 is beside it."""
    unit, model = rows[0]["unit"], rows[0]["model"]
    used = [
        x for x in ("vllm", "vllm_prefix_sharing", "shared_attention", "no_attention")
        if any(row[x] != "" for row in rows)
    ]  # fmt: skip
    headings = ["hardware", "requests", "prefix tokens"]
    headings += [f"{x.replace('_', ' ').replace('vllm', 'vLLM')}, {unit}" for x in used]
    headings.append("times the better vLLM")
    theory = rows[0]["context_tokens"] != ""
    less_is_better = unit == "us"
    cells = []
    for row in rows:
        of_vllm = [row[x] for x in ("vllm", "vllm_prefix_sharing") if row[x] != ""]
        ours = row["shared_attention"]
        times = min(of_vllm) / ours if less_is_better else ours / max(of_vllm)
        line = [row["hardware"], shown(row["requests"]), shown(row["prefix_tokens"])]
        line += [*(f"{row[x]:,}" for x in used), f"{times:.2f}"]
        if theory:
            given = (row["requests"], row["prefix_tokens"], row["context_tokens"])
            line.append(f"{theoretical_speed_up(*given):.2f}")
        cells.append(line)
    sources = ", ".join(dict.fromkeys(row["source"] for row in rows))
    title = of[0].upper() + of[1:] + (f", {model}" if model else "")
    text = table(headings + (["eq. 10"] if theory else []), cells)
    return f"### {title}\n\n{text}\nSource: {sources}.\n\n"
