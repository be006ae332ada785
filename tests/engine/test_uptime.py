"""A sample of the soak's uptime: a process with relay does not grow, and a leak would be seen.

All of it, 10⁵ steps: ``make soak PART=uptime``.
"""

from pathlib import Path

import pytest

from tests.soak import uptime


@pytest.mark.slow
@pytest.mark.engine
def test_a_process_does_not_grow_and_leaks_are_seen(tmp_path: Path) -> None:
    found = uptime.measure(tmp_path, 1500, 1500, small=True)
    assert not uptime.failures(found)
    for name in uptime.LEAKS:
        grown = {**found, "rss_growth_bytes": found["leaks"][name]}
        assert uptime.failures(grown), name
