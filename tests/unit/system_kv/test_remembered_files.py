"""The folder of remembered prefixes: names by content, and bad folders in one line."""

from pathlib import Path

import pytest

from tests.unit.system_kv.remembering_engine import IDENTITY
from vllm_relay.system_kv.file import SystemKVError
from vllm_relay.system_kv.remembered_files import file_name, hottest_first, mark, prepare


def test_names_differ_with_the_tokens_and_the_engine_alone() -> None:
    name = file_name(IDENTITY, [1, 2, 3])
    assert name == file_name({**IDENTITY, "model": "/elsewhere"}, (1, 2, 3))
    assert name != file_name(IDENTITY, [1, 23])
    assert name != file_name({**IDENTITY, "weights": "0" * 64}, [1, 2, 3])


def test_files_are_ordered_by_their_marks_and_others_are_not_seen(tmp_path: Path) -> None:
    for name, hot_at in (("hot-a.relay", 3.0), ("hot-b.relay", 5.0), ("acme.relay", 9.0)):
        (tmp_path / name).touch()
        assert mark(tmp_path / name, hot_at)
    assert [path.name for path in hottest_first(tmp_path)] == ["hot-b.relay", "hot-a.relay"]
    assert not mark(tmp_path / "hot-c.relay", 1.0)


def test_a_folder_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    prepare(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").stat().st_mode & 0o077 == 0
    prepare(tmp_path / "a" / "b")
    assert not list((tmp_path / "a" / "b").iterdir())


@pytest.mark.parametrize(("place", "reason"), [("file", "File exists"), ("file/a", "Not a dir")])
def test_a_folder_that_cannot_be_written_is_named(place: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        SystemKVError, match=rf"^system_kv\.remember .*{place}: cannot be written: {reason}"
    ):
        prepare(tmp_path / place)
