"""A failure at any call of relay leaves the engine alive and its answers stock's: a sample.

All of it, n from 1 to 200: ``make soak PART=failures``.
"""

import pytest

from tests.soak.failures import fail
from tests.soak.seams import SEAMS

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# A fault in the fallback and what is seen of it; the last ends the engine.
FAULTS = {
    "two lines": "lines in the log",
    "nothing is counted": "0 fallbacks",
    "nothing is answered": "other tokens",
    "nothing is caught": "engine died",
}


def test_a_failure_is_one_line_and_stocks_answer_and_a_broken_fallback_is_found() -> None:
    runs = [(seam, n, None) for n in (1, 9, 65, 200) for seam in SEAMS]
    broken = [("native call", 50, fault) for fault in FAULTS]
    done = fail([*runs, *broken])["runs"]
    assert [text for _, text in done[: len(runs)]] == [None] * len(runs)
    assert all(calls >= n for (_, n, _), (calls, _) in zip(runs, done, strict=False))
    for seen, (_, text) in zip(FAULTS.values(), done[len(runs) :], strict=True):
        assert seen in text
