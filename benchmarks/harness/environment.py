"""What every benchmark needs: provenance, CSV files, the model folder, progress."""

import csv
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from vllm_relay.serving.provenance import provenance as of_machine

ROOT = Path(__file__).resolve().parents[2]
MODEL_NAME = "SmolLM2-135M-Instruct"
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_COLOR": "0"}
# The models lie on the disk: no child process need ask a hub for them.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Weights and KV caches in huge pages, where the system gives them to who asks. In small ones equal
# engines differ by where theirs happen to lie, and for as long as they live: no round shows it.
HUGE_PAGES = {"GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")}


def model_path(root: Path = ROOT) -> Path:
    """The folder of the demo model; FileNotFoundError says how to make it."""
    path = root / ".models" / MODEL_NAME
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"no model in .models/{MODEL_NAME}: run `make model`")
    return path


def kv_gib() -> int:
    """GiB for the KV cache of each CPU engine that is compared: the user's, else 2."""
    return int(os.environ.get("VLLM_CPU_KVCACHE_SPACE", "2"))


def _revision() -> str:
    """Short git revision, `-dirty` if tracked files differ from it, "none" outside a commit.

    But for the report and its figures, which benchmarks themselves make.
    """
    git = ["git", "-C", str(ROOT)]
    changed = [*git, "diff", "--quiet", "HEAD", "--", ".", ":!benchmarks/REPORT.md"]
    try:
        done = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        )
        if done.returncode:
            return "none"
        dirty = subprocess.run([*changed, ":!benchmarks/results"], check=False).returncode
    except FileNotFoundError:  # a machine without git still runs the benchmarks
        return "none"
    return done.stdout.strip() + ("-dirty" if dirty else "")


def provenance() -> dict[str, str]:
    """Where a number comes from: date, device, cores, versions, revision, command."""
    script = Path(sys.argv[0]).resolve()
    shown = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script.name
    command = shlex.join(["python", str(shown), *sys.argv[1:]])
    return {**of_machine(), "revision": _revision(), "command": command}


def write_csv(path: Path, rows: list[dict[str, Any]], prov: dict[str, str]) -> Path:
    """Write `rows`, each with the columns of `prov`, to a new file beside `path`.

    `results/demo.csv` becomes `results/demo-20260131-120000.csv`: an old measurement is never
    overwritten. Returns the path written. Raises ValueError if there are no rows.
    """
    if not rows:
        raise ValueError("rows is empty: nothing was measured")
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = list(dict.fromkeys(key for row in rows for key in (*row, *prov)))
    stem = f"{path.stem}-{datetime.now():%Y%m%d-%H%M%S}"
    tried = 1
    while True:
        name = f"{stem}{'' if tried == 1 else f'-{tried}'}{path.suffix}"
        try:
            with (path.parent / name).open("x", newline="") as file:
                writer = csv.DictWriter(file, columns, restval="")
                writer.writeheader()
                writer.writerows({**row, **prov} for row in rows)
        except FileExistsError:
            tried += 1
            continue
        return path.parent / name


@contextmanager
def step(console: Console, title: str) -> Iterator[Callable[[str], None]]:
    """A spinner with elapsed seconds; the body reports what it is doing. Ends with one line that
    stays. Without a terminal: plain lines, at most one every 5 s."""
    started = printed = time.monotonic()
    live = console.is_terminal
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not live) as progress:
        task = progress.add_task(title)

        def report(doing: str) -> None:
            nonlocal printed
            progress.update(task, description=f"{title}: {doing}")
            if not live and time.monotonic() - printed >= 5:
                printed = time.monotonic()
                console.print(f"  {title}: {doing}", highlight=False)

        yield report
    seconds = time.monotonic() - started
    console.print(f"  [green]done[/] {title} [dim]({seconds:.0f} s)[/]", highlight=False)
