"""A sample of the soak's kills: builds that are ended leave no process and no half file.

All of it, 300 kills of four commands: ``make soak PART=kills``.
"""

import pytest

from tests.soak import kills


@pytest.mark.slow
@pytest.mark.engine
def test_builds_that_are_ended_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kills, "GONE_S", 150.0)  # other tests run beside it
    monkeypatch.setattr(kills, "WARM_UPS", 0)  # its figure may be that of a first, slower run
    row = kills.kill("build", 2, seed=1, ways=("kill", "term"))
    assert row["kills"] == 2 and row["whole"] >= 2
    assert (row["survivors"], row["leftovers"], row["failures"]) == (0, 0, 0)
