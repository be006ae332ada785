"""``vllm-relay top`` against an HTTP server that counts on."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tests.unit.test_cli import cli, refused
from vllm_relay.monitoring import channel
from vllm_relay.monitoring.prometheus import COUNTERS, RelayCollector
from vllm_relay.system_kv.stats import HOT, SystemKVMetrics

Counts = dict[int, list[dict[str, int]]]
GROUPS = [
    {"level": 0, "requests": 8, "tokens": 1024},
    {"level": 1, "requests": 3, "tokens": 256},
    {"level": 0, "requests": 2, "tokens": 512},
]


def show_hot(registry: CollectorRegistry) -> None:
    """The gauges of engine 0, which had two hot prefixes and has one."""
    in_registry: Any = {
        kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)
    }
    labels: dict[int, list[object]] = {0: ["model", "0"]}
    found = SystemKVMetrics(
        SimpleNamespace(kv_transfer_config=None), in_registry, ["model_name", "engine"], labels
    )
    found.observe({HOT: [[9.5, 2048], [3.0, 512]]})
    found.observe({HOT: [[9.0, 2048]]})


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Serves /metrics of engines with these counters: look by look, the last for ever."""
    servers: list[ThreadingHTTPServer] = []

    def start(counts: Counts) -> str:
        looks = [0]

        def ask() -> dict[str, Any]:
            look, looks[0] = looks[0], looks[0] + 1
            return {
                f"{engine}-0": {
                    "engine": engine,
                    "counters": series[min(look, len(series) - 1)],
                    "groups": GROUPS,
                    "packed_bytes": 4096,
                }
                for engine, series in counts.items()
            }

        monkeypatch.setattr(channel, "ask", ask)
        registry = CollectorRegistry()
        registry.register(RelayCollector("model"))
        show_hot(registry)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = generate_latest(registry)
                self.send_response(200 if self.path == "/metrics" else 404)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                pass

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def counters(**given: float) -> Any:
    return dict.fromkeys(COUNTERS, 0) | given


BEFORE = counters(steps=100, steps_relayed=90, groups=90, requests=900, tokens_shared=1000)
NOW = counters(
    steps=110, steps_relayed=98, groups=106, requests=1060, tokens_shared=9000, fallbacks_plan=2,
    predicted_saved_seconds=0.5, planning_seconds=0.25,
)  # fmt: skip


def test_ratios_are_of_the_interval_and_totals_since_the_start(serve: Any) -> None:
    url = serve({0: [BEFORE, NOW], 1: [NOW]})
    done = cli("top", "--url", url, "--interval", "0.1", "--once", "--json")
    assert done.exit_code == 0, done.stderr
    first, idle = (json.loads(done.stdout)[engine] for engine in "01")
    assert (first["relayed"], first["groups_per_step"]) == (0.8, 2)
    assert (first["requests_per_step"], first["tokens_shared_per_step"]) == (20, 1000)
    assert first["steps_per_s"] > 0 and first["total"]["steps"] == 110
    assert first["total"]["fallbacks"] == 2 and first["groups"] == GROUPS
    assert first["hot_prefixes"] == [{"requests": 9, "tokens": 2048}] and not idle["hot_prefixes"]
    assert first["predicted_saved_share"] > first["planning_share"] > 0
    assert (idle["steps_per_s"], idle["relayed"]) == (0, None)
    assert (idle["predicted_saved_share"], idle["planning_share"]) == (0, 0)


def test_an_engine_that_was_restarted_counts_from_nothing(serve: Any) -> None:
    url = serve({0: [NOW, counters(steps=10, steps_relayed=5, groups=5)]})
    done = cli("top", "--url", f"{url}/", "--interval", "0.1", "--once", "--json")
    assert json.loads(done.stdout)["0"]["relayed"] == 0.5


def test_the_table_has_a_row_per_engine(serve: Any) -> None:
    url = serve({0: [BEFORE, NOW], 1: [NOW]})
    done = cli("top", "--url", url, "--interval", "0.1", "--once")
    lines = [line.split() for line in done.stdout.splitlines()]
    rows = [line for line in lines if len(line) == 10]
    assert [row[0] for row in rows] == ["engine", "0", "1"]
    assert rows[1][2:6] == ["80%", "2.0", "20.0", "1,000.0"] and rows[1][-1] == "2"
    assert rows[2][2:6] == ["-", "-", "-", "-"]
    groups = [["0", "8", "1,024", "7,168"], ["└", "1", "3", "256", "512"], ["0", "2", "512", "512"]]
    assert [line for line in lines if line in groups] == 2 * groups
    assert lines.count(["9.0", "2,048"]) == 1


@pytest.fixture
def page(serve: Any) -> Iterator[str]:
    """URL of the page of a server with one engine."""
    command = [sys.executable, "-m", "vllm_relay.cli", "top", "--page", "0", "--interval", "0.2"]
    child = subprocess.Popen(
        [*command, "--url", serve({0: [BEFORE, NOW]})], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    yield child.stdout.readline().split()[0]
    child.kill()
    child.wait()


def test_the_page_loads_nothing_from_elsewhere_and_has_the_data_beside_it(page: str) -> None:
    assert page.startswith("http://127.0.0.1:")
    html = httpx.get(page)
    assert "default-src 'none'" in html.headers["content-security-policy"]
    assert html.text.count("http") == 0
    for _ in range(100):
        if found := httpx.get(f"{page}/data").json():
            break
    assert found["engines"]["0"]["groups"] == GROUPS and found["error"] is None
    assert len(found["history"]) >= 1
    assert httpx.get(f"{page}/metrics").status_code == 404


@pytest.mark.skipif(shutil.which("chromium") is None, reason="this machine has no chromium")
def test_the_page_draws_groups_inside_of_others(page: str) -> None:
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000")
    done = subprocess.run(
        ["chromium", *options, "--dump-dom", page], capture_output=True, text=True, check=True
    )
    first, second = done.stdout.split('<div class="row">')[1:3]
    assert "8 requests share 1,024 tokens" in first and "2 requests share 512 tokens" in first
    assert "9 requests of late under 2,048 tokens" in done.stdout
    assert "3 requests share 256 tokens" in second and 'class="gap"' in second


def test_what_is_wrong_is_said_in_a_line(serve: Any) -> None:
    assert refused("top", "--json") == "--json needs --once"
    assert refused("top", "--page", "1", "--once").startswith("--page is served until Ctrl-C")
    url = serve({})
    assert refused("top", "--url", url) == (
        f"{url}/metrics: has no counters of relay: is it the server's backend?"
    )
    shared = serve({0: [NOW]})
    assert refused("top", "--url", shared, "--page", "x").startswith("--page x: invalid literal")
    assert refused("top", "--url", f"{url}/v1").startswith(f"{url}/v1/metrics: HTTP Error 404")
    assert refused("top", "--url", "localhost").startswith("localhost/metrics: unknown url type")
    assert "Connection refused" in refused("top", "--url", "http://127.0.0.1:9")
