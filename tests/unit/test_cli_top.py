"""``vllm-relay top`` against an HTTP server that counts on."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.unit.test_cli import cli, refused
from vllm_relay.monitoring import channel
from vllm_relay.monitoring.prometheus import COUNTERS, RelayCollector

Counts = dict[int, list[dict[str, int]]]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Serves /metrics of engines with these counters: look by look, the last for ever."""
    servers: list[ThreadingHTTPServer] = []

    def start(counts: Counts) -> str:
        looks = [0]

        def ask() -> dict[str, Any]:
            look, looks[0] = looks[0], looks[0] + 1
            return {
                f"{engine}-0": {"engine": engine, "counters": series[min(look, len(series) - 1)]}
                for engine, series in counts.items()
            }

        monkeypatch.setattr(channel, "ask", ask)
        registry = CollectorRegistry()
        registry.register(RelayCollector("model"))

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


def counters(**given: int) -> dict[str, int]:
    return dict.fromkeys(COUNTERS, 0) | given


BEFORE = counters(steps=100, steps_relayed=90, groups=90, requests=900, tokens_shared=1000)
NOW = counters(
    steps=110, steps_relayed=98, groups=106, requests=1060, tokens_shared=9000, fallbacks_plan=2
)


def test_ratios_are_of_the_interval_and_totals_since_the_start(serve: Any) -> None:
    url = serve({0: [BEFORE, NOW], 1: [NOW]})
    done = cli("top", "--url", url, "--interval", "0.1", "--once", "--json")
    assert done.exit_code == 0, done.stderr
    first, idle = (json.loads(done.stdout)[engine] for engine in "01")
    assert (first["relayed"], first["groups_per_step"]) == (0.8, 2)
    assert (first["requests_per_step"], first["tokens_shared_per_step"]) == (20, 1000)
    assert first["steps_per_s"] > 0 and first["total"]["steps"] == 110
    assert first["total"]["fallbacks"] == 2
    assert (idle["steps_per_s"], idle["relayed"]) == (0, None)


def test_an_engine_that_was_restarted_counts_from_nothing(serve: Any) -> None:
    url = serve({0: [NOW, counters(steps=10, steps_relayed=5, groups=5)]})
    done = cli("top", "--url", f"{url}/", "--interval", "0.1", "--once", "--json")
    assert json.loads(done.stdout)["0"]["relayed"] == 0.5


def test_the_table_has_a_row_per_engine(serve: Any) -> None:
    url = serve({0: [BEFORE, NOW], 1: [NOW]})
    done = cli("top", "--url", url, "--interval", "0.1", "--once")
    rows = [line.split() for line in done.stdout.splitlines() if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == ["0", "1"]
    assert rows[0][2:6] == ["80%", "2.0", "20.0", "1,000.0"] and rows[0][-1] == "2"
    assert rows[1][2:6] == ["-", "-", "-", "-"]


def test_what_is_wrong_is_said_in_a_line(serve: Any) -> None:
    assert refused("top", "--json") == "--json needs --once"
    url = serve({})
    assert refused("top", "--url", url) == (
        f"{url}/metrics: has no counters of relay: is it the server's backend?"
    )
    assert refused("top", "--url", f"{url}/v1").startswith(f"{url}/v1/metrics: HTTP Error 404")
    assert refused("top", "--url", "localhost").startswith("localhost/metrics: unknown url type")
    assert "Connection refused" in refused("top", "--url", "http://127.0.0.1:9")
