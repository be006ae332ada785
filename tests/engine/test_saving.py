"""A sample of the soak's saving: killed engines leave whole files, which the next one loads.

All of it, 200 kills: ``make soak PART=saving``.
"""

import pytest

from tests.soak import saving

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_engines_killed_while_they_save_leave_whole_files() -> None:
    found = saving.run_chunk(0, kills=2)
    assert found["failures"] == 0, found
    assert found["kills"] == 2 and found["starts_with_files"] == found["hits"] == 2, found
    assert found["files_verified"] > 0
