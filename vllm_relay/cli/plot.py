"""The picture of `explain`: KV tokens read per decode step over the time of the trace."""

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_relay.explain.replay import Replay

BINS = 160
Floats = NDArray[np.float64]


def draw(results: list[Replay], name: str) -> bytes:
    """The PNG: KV tokens per step of one replay, or shares saved of several.

    Raises:
        ValueError: there is nothing to draw.
    """
    if not all(result.steps for result in results):
        raise ValueError("nothing to plot: no request generates a token")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import EngFormatter, PercentFormatter

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    # Without timestamps all requests come at once.
    ends = [(result.intervals[0].timestamp, result.intervals[-1].timestamp) for result in results]
    in_time = all(last > first for first, last in ends)
    if len(results) == 1:
        (result,) = results
        x, stock, relay, once = _binned(result, in_time)
        axes.plot(x, stock, label="vLLM's attention", color="tab:gray")
        axes.plot(x, relay, label=f"relay: {result.saved:.1%} fewer", color="tab:blue", linewidth=3)
        axes.plot(x, once, label="each shared block once", color="black", linestyle=":")
        axes.yaxis.set_major_formatter(EngFormatter())
        axes.set_ylabel("KV tokens read per decode step and layer")
        title = f"{name}: {result.concurrency:,} requests decode at once"
    else:
        for result in results:
            x, stock, relay, once = _binned(result, in_time)
            label = f"{result.concurrency:,} at once: {result.saved:.1%}"
            shares = 1 - relay / np.maximum(stock, 1), 1 - once / np.maximum(stock, 1)
            # Pale and wide: the dots show on it where all is saved that can be.
            (line,) = axes.plot(x, shares[0], label=label, linewidth=3, alpha=0.5)
            axes.plot(x, shares[1], color=line.get_color(), linestyle=":")
        axes.plot([], [], color="black", linestyle=":", label="each shared block once")
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.set_ylabel("KV reads saved")
        title = f"{name}: KV reads saved in decode steps"
    axes.set_ylim(bottom=0)
    axes.set_xlabel("time of the trace (minutes)" if in_time else "decode step")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, columnspacing=1.2, frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=150)
    pyplot.close(figure)
    return image.getvalue()


def _binned(result: Replay, in_time: bool) -> list[Floats]:
    """Where bins lie, and KV tokens per step in each: stock, relay, once. Empty bins are left out.

    The time is that of the newest request, and ends with the last one: the steps after it, in which
    fewer and fewer are left, would all be put there.
    """
    rows: list[Any] = [(i.timestamp, i.steps, i.stock, i.relay, i.once) for i in result.intervals]
    table = np.array(rows, dtype=np.float64).T
    if in_time:
        table = table[:, table[0] < table[0, -1]]
    times, steps, *tokens = table
    x = times / 60_000 if in_time else np.cumsum(steps) - steps / 2
    weight, *sums = (np.histogram(x, BINS, weights=w)[0] for w in (steps, x * steps, *tokens))
    return [total[weight > 0] / weight[weight > 0] for total in sums]
