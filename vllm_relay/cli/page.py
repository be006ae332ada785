"""The page of ``vllm-relay top --page``: one static file, and its data at the same origin."""

import json
import threading
import time
from collections import deque
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any

from vllm_relay.cli.console import out

# Looks that the page shows.
_HISTORY = 300
# The page loads nothing from elsewhere and sends nothing.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
)

Look = Callable[[], dict[str, Any]]


class Page:
    """Data of the page: what was seen in the last looks, and the page itself.

    Args:
        url: of the server, to be shown. look: as `Scraper.engines`.
    """

    def __init__(self, url: str, look: Look) -> None:
        self._look = look
        self._url = url
        self._history: deque[dict[str, Any]] = deque(maxlen=_HISTORY)
        self.html = files("vllm_relay.cli").joinpath("top.html").read_bytes()
        self.data = b"{}"

    def look(self) -> None:
        """Take one look; a server that does not answer is an ``error`` of the data."""
        error, engines = None, {}
        try:
            engines = self._look()
        except ValueError as failed:
            error = str(failed)
        self._history.append(
            {
                name: sum(engine[name] for engine in engines.values())
                for name in ("kv_bytes_not_read_per_s", "predicted_saved_share")
            }
        )
        found = {"url": self._url, "error": error, "engines": engines, "history": [*self._history]}
        self.data = json.dumps(found).encode()


def serve_page(address: str, url: str, look: Look, interval: float) -> None:
    """Serve the page until Ctrl-C, with a look every ``interval`` seconds.

    Args:
        address: "[HOST:]PORT".

    Raises:
        ValueError: no address, or one that cannot be had.
    """
    host, _, port = address.rpartition(":")
    page = Page(url, look)
    try:
        server = ThreadingHTTPServer((host or "127.0.0.1", int(port)), _handler(page))
    except (OSError, OverflowError, ValueError) as error:
        raise ValueError(f"--page {address}: {error}") from error
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        shown, at = server.server_address[:2]
        out.print(f"http://{shown!s}:{at} shows {url}; Ctrl-C ends it", highlight=False)
        while True:
            page.look()
            time.sleep(interval)


def _handler(page: Page) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            bodies = {"/": ("text/html", page.html), "/data": ("application/json", page.data)}
            kind, body = bodies.get(self.path, ("text/plain", b"not found\n"))
            self.send_response(200 if self.path in bodies else 404)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Security-Policy", _POLICY)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler
