"""`or_off`: a call by the engine whose failure ends a feature with one line in the log."""

from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol

from vllm_relay import metrics


class Feature(Protocol):
    """``off``: why it ended, or None; ``title``, ``after``: in the log; ``counted``: in metrics."""

    off: str | None
    title: str
    counted: str
    after: str


def or_off(method: Callable[..., None]) -> Callable[..., None]:
    """A method of a `Feature` that does nothing once the feature has failed."""

    @wraps(method)
    def guarded(self: Feature, *args: Any) -> None:
        if self.off is None:
            try:
                method(self, *args)
            except Exception as error:
                self.off = " ".join(f"{type(error).__name__}: {error}".split())
                metrics.count_fallback(self.counted)
                metrics.logger.warning("relay: %s is off: %s; %s", self.title, self.off, self.after)

    return guarded
