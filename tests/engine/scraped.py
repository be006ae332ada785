"""A Prometheus server of its own that scrapes a server of the tests."""

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from vllm_relay.serving.processes import Process, free_port

PROMETHEUS = shutil.which("prometheus")
_CONFIG = """
global: {{scrape_interval: 1s}}
scrape_configs:
  - job_name: vllm
    static_configs: [{{targets: ["{target}"]}}]
"""


class Prometheus:
    """Queries of a running Prometheus server."""

    def __init__(self, url: str) -> None:
        self._url = url

    def values(self, query: str) -> dict[tuple[str, ...], float]:
        """Values of an instant query by the values of their labels, sorted by name."""
        answer = httpx.get(f"{self._url}/api/v1/query", params={"query": query}, timeout=60).json()
        assert answer["status"] == "success", answer
        return {
            tuple(value for _, value in sorted(series["metric"].items())): float(series["value"][1])
            for series in answer["data"]["result"]
        }

    def wait(self, query: str, good: Any) -> dict[tuple[str, ...], float]:
        """`values` once they are ``good``, or after a minute as they are then."""
        found: dict[tuple[str, ...], float] = {}
        for _ in range(120):
            if good(found := self.values(query)):
                break
            time.sleep(0.5)
        return found


@contextmanager
def scraping(url: str, folder: Path) -> Iterator[Prometheus]:
    """Prometheus that scrapes ``url`` each second; its data lie in the folder."""
    folder.mkdir()
    config, address = folder / "prometheus.yml", f"127.0.0.1:{free_port()}"
    config.write_text(_CONFIG.format(target=url.removeprefix("http://")))
    flags = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    command = [str(PROMETHEUS), *flags, f"--web.listen-address={address}"]
    child = Process(command, folder / "log", None)
    try:
        for _ in range(120):
            try:
                if httpx.get(f"http://{address}/-/ready").status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            assert child.poll() is None, child.text()
            time.sleep(0.5)
        yield Prometheus(f"http://{address}")
    finally:
        child.kill()


def queries(dashboard: Path) -> dict[str, str]:
    """Queries of a Grafana dashboard by panel and letter, for all models and the last minute."""
    found = {}
    for panel in json.loads(dashboard.read_text())["panels"]:
        for target in panel["targets"]:
            query = target["expr"].replace("$__rate_interval", "1m").replace("$model", ".*")
            found[f"{panel['title']} {target['refId']}"] = query
    return found
