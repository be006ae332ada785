"""Fallback: what fails in relay is left to vLLM's own attention; the engine sees no exception."""

import traceback

from vllm_relay import metrics

# Failures of a builder and its layers after which relay stays off until the engine is restarted.
MOST_FAILURES = 3


class Fallback:
    """Failures of one metadata builder and its layers; ``off``: relay is not tried again."""

    def __init__(self) -> None:
        self.failures = 0
        self._logged: set[str] = set()

    @property
    def off(self) -> bool:
        return self.failures >= MOST_FAILURES

    def failed(self, doing: str, error: Exception) -> None:
        """Count a failure of "start", "planning", "packing" or "attention"; one line per cause."""
        self.failures += 1
        metrics.count_fallback(doing)
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        self._log(f"{doing} failed and is left to vLLM's own attention: {cause}")
        metrics.logger.debug("relay: %s", "".join(traceback.format_exception(error)))
        if self.off:
            self._log(
                "switched off for these layers until the engine is restarted, "
                f"after {self.failures} failures"
            )

    def _log(self, message: str) -> None:
        if message not in self._logged:
            self._logged.add(message)
            metrics.logger.warning("relay: %s", message)
