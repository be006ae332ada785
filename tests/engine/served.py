"""A server with the worker extension of the tests: its answers, its workers, a load on it."""

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from openai import APIError, OpenAI


class Served:
    """Answers and workers of a server."""

    def __init__(self, url: str, model: Path, prompts: list[list[int]]) -> None:
        self.url, self.model, self.prompts = url, str(model), prompts
        self.client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def ask(self, tokens: int, **more: Any) -> Any:
        return self.client.completions.create(
            model=self.model,
            prompt=self.prompts,
            max_tokens=tokens,
            temperature=0,
            extra_body={"ignore_eos": True, "return_token_ids": True},
            **more,
        )

    def answers(self) -> dict[str, list[tuple[int, float]]]:
        """As `Ways.greedy`."""
        done = self.ask(8, logprobs=0)
        return {
            f"{c.index}-0": list(zip(c.token_ids, c.logprobs.token_logprobs, strict=True))
            for c in done.choices
        }

    def hits(self, count: int) -> list[float]:
        """Requests that found each system KV, once they are so many: engines report later."""
        pattern = r'vllm:relay_system_kv_requests_total\{.*prompt="(\w+)".*\} (\S+)'
        found: Counter[str] = Counter()
        for _ in range(300):
            text = httpx.get(f"{self.url}/metrics", timeout=60).text
            found = Counter()
            for prompt, value in re.findall(pattern, text):
                found[prompt] += float(value)
            if found.total() >= count:
                break
            time.sleep(0.1)
        return sorted(found.values())

    def counted(self, name: str, expected: list[int]) -> list[float]:
        """A counter of relay by engine, sorted, once it is as expected: a busy worker is late."""
        pattern = rf'vllm:relay_{name}_total\{{engine="\d",model_name="(.*)"\}} (\S+)'
        found: list[float] = []
        for _ in range(300):
            text = httpx.get(f"{self.url}/metrics", timeout=60).text
            found = sorted(float(value) for _, value in re.findall(pattern, text))
            if found == sorted(expected):
                break
            time.sleep(0.1)
        return found

    def rpc(self, method: str, *args: str) -> None:
        body = {"method": method, "args": args}
        httpx.post(f"{self.url}/collective_rpc", json=body, timeout=60).raise_for_status()

    def relayed(self, folder: Path) -> list[int]:
        """Steps of each engine's worker."""
        self.rpc("write_counters", str(folder))
        return [json.loads(file.read_text())["steps_relayed"] for file in folder.iterdir()]

    @contextmanager
    def under_load(self, streams: int = 2) -> Iterator[None]:
        """Requests one after another, of which some are being answered in the body; the body has to
        end the server, and they have ended with it."""
        running = threading.Event()

        def load() -> None:
            with suppress(APIError, httpx.HTTPError):  # the server has gone
                while True:
                    for _ in self.ask(300, stream=True):
                        running.set()

        threads = [threading.Thread(target=load, daemon=True) for _ in range(streams)]
        for thread in threads:
            thread.start()
        assert running.wait(120)
        yield
        for thread in threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in threads)
