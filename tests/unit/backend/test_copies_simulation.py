"""No stale read of a packed segment in a sample of the soak, which finds every planted fault.

All of it, 10⁶ steps: ``make soak``.
"""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.result_csv import read, run_chunks
from tests.soak.copies import simulate
from tests.soak.copies_faults import FAULTS, planted


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_no_read_of_a_packed_segment_is_stale(seed: int) -> None:
    counts = simulate(seed, 4000)
    assert counts.stale == 0
    assert counts.uses_of_kept > 500


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_guard_is_found(name: str) -> None:
    fault = FAULTS[name]
    with planted(fault):
        assert simulate(fault.seed, 2500, until_stale=True).stale


def test_a_soak_that_was_ended_goes_on_where_it_was(tmp_path: Path) -> None:
    path, ran = tmp_path / "soak" / "part.csv", []

    def run_chunk(chunk: int) -> dict[str, Any]:
        ran.append(chunk)
        if len(ran) == 3:
            raise KeyboardInterrupt
        return {"failures": chunk}

    with pytest.raises(KeyboardInterrupt):
        run_chunks(path, run_chunk, range(4), {"revision": "1e10"})
    rows = run_chunks(path, run_chunk, range(4), {"revision": "1e10"})
    assert ran == [0, 1, 2, 2, 3]
    assert [row["failures"] for row in rows] == [0, 1, 2, 3] and len(read(path)) == 4
    run_chunks(path, run_chunk, range(1), {"revision": "another"})
    run_chunks(path, run_chunk, range(1), {"revision": "another-dirty"})
    run_chunks(path, run_chunk, range(1), {"revision": "another-dirty"})
    assert ran[5:] == [0, 0, 0]
