"""Measured constants: which are taken, for which shape, and what a file may hold."""

import fcntl
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from threading import Thread

import pytest

from vllm_relay.sharing import KernelCosts, cost_store, whole_files
from vllm_relay.sharing.cost_store import Constants, find_costs, load, save
from vllm_relay.validation import checked

HERE = Constants(
    device="some CPU (vec)",
    threads=1,
    heads=8,
    kv_heads=2,
    head_size=64,
    dtype="bfloat16",
    cache=1 << 20,
    stock=KernelCosts(call=1e-6, token=2e-12, first=3e-11, read=4e-12, far=6e-12, pair=5e-12),
    context=KernelCosts(call=2e-6, token=3e-12, first=4e-11, read=5e-12, far=6e-12, pair=6e-12),
    system=KernelCosts(call=3e-6, token=4e-12, first=5e-11, read=0.0, far=0.0, pair=1e-12),
    packed=KernelCosts(call=3e-6, token=4e-12, first=2e-11, read=0.0, far=0.0, pair=8e-13),
    fusion=1e-10,
    step=1e-5,
    level=2e-6,
    copy=2e-10,
)


@pytest.fixture(autouse=True)
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "folder" / "devices.json"
    monkeypatch.setenv("VLLM_RELAY_DEVICES", str(path))
    return path


def find(
    heads: int = 8, kv_heads: int = 2, head_size: int = 64, **given: object
) -> cost_store.Found:
    arguments = {"device": HERE.device, "threads": 1, **given}
    return find_costs(heads, kv_heads, head_size, **arguments)  # type: ignore[arg-type]


def test_constants_become_costs_by_bytes_and_operations() -> None:
    costs = HERE.costs(8, 2, 64, "bfloat16")
    kv_bytes, query_bytes, flops = 2 * 2 * 64 * 2, 8 * 64 * 2, 4 * 8 * 64
    assert costs.stock.call == 1e-6 and costs.step == 1e-5 and costs.level == 2e-6
    assert costs.stock.first == pytest.approx(3e-11 * kv_bytes)
    assert costs.context.read == pytest.approx(5e-12 * kv_bytes)
    assert costs.system.token == pytest.approx(4e-12 * query_bytes)
    assert costs.system.pair == pytest.approx(1e-12 * flops)
    assert costs.fusion == pytest.approx(1e-10 * query_bytes)
    assert costs.copy == pytest.approx(2e-10 * kv_bytes)
    assert costs.stock.far == pytest.approx(6e-12 * kv_bytes)
    assert costs.near == (1 << 20) / (2 * 64 * 2)
    twice = HERE.costs(16, 4, 64, "float32")
    assert twice.stock.first == pytest.approx(4 * costs.stock.first)
    assert twice.stock.pair == pytest.approx(2 * costs.stock.pair)


def test_the_users_measurement_of_the_same_comes_first(own_file: Path) -> None:
    save([HERE], own_file)
    found = find()
    assert found.costs == HERE.costs(8, 2, 64, "bfloat16")
    assert (found.margin, found.guessed) == (cost_store.MARGIN, False)
    assert str(own_file) in found.source and "8/2 heads of 64" in found.source
    # a newer one takes its place; other shapes, threads and devices stay beside it
    others = [replace(HERE, threads=2), replace(HERE, heads=4), replace(HERE, device="other")]
    save([replace(HERE, step=0.5), *others], own_file)
    assert len(load(own_file)) == 4 and find().costs.step == 0.5
    assert find(threads=2).costs.step == 1e-5
    # without its instruction set a name stands for all
    assert not find(device="some CPU").guessed


def test_another_shape_or_device_stands_in_with_a_wider_margin(own_file: Path) -> None:
    save([HERE, replace(HERE, heads=32, kv_heads=8, head_size=128, step=0.5)], own_file)
    near = find(28, 4, 128)
    assert near.costs.step == 0.5 and not near.guessed
    assert near.margin == cost_store.MARGIN_OF_A_GUESS
    assert near.costs.stock.first == pytest.approx(3e-11 * 2 * 4 * 128 * 2)
    other = find(device="no such CPU")
    assert other.guessed and other.margin == cost_store.MARGIN_OF_A_GUESS
    assert other.source.startswith("no such CPU with 1 thread was not measured; costs of some CPU")


def test_what_is_shipped_can_be_read_and_is_of_real_machines() -> None:
    shipped = load(cost_store.SHIPPED)
    assert len({entry.shape() for entry in shipped}) == len(shipped) >= 3
    for entry in shipped:
        assert entry.measured and "(" in entry.device
        costs = entry.costs(entry.heads, entry.kv_heads, entry.head_size, entry.dtype)
        assert costs.packed is not None and costs.packed.pair > 0
        assert costs.stock.first > 0 and costs.stock.pair + costs.stock.read > 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting property name"),
        ("{}", r": must be a valid list, got \{\}"),
        ("[1]", r": \[0\] must be a dictionary or an instance of Constants, got 1"),
        ('[{"device": 1}]', r": \[0\].device must be a valid string, got 1"),
    ],
)
def test_a_file_that_is_none_is_named(own_file: Path, text: str, message: str) -> None:
    own_file.parent.mkdir()
    own_file.write_text(text)
    with pytest.raises(ValueError, match=message) as raised:
        find()
    assert str(raised.value).startswith(str(own_file))
    # and it is not written over
    with pytest.raises(ValueError, match=message):
        save([HERE], own_file)
    assert own_file.read_text() == text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"threads": 0}, "threads must be >= 1, got 0"),
        ({"threads": True}, "threads must be a valid integer, got True"),
        ({"step": -1.0}, "step must be >= 0, got -1.0"),
        ({"step": float("nan")}, "step must be a finite number, got nan"),
        ({"device": 3}, "device must be a valid string, got 3"),
        ({"extra": 1}, "extra is unknown; known: device, threads"),
    ],
)
def test_a_wrong_value_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checked(Constants, asdict(HERE) | change, "")


def test_a_missing_value_is_named() -> None:
    given = asdict(HERE)
    del given["stock"]["pair"]
    with pytest.raises(ValueError, match=r"^entry: stock\.pair is missing$"):
        checked(Constants, given, "entry: ")
    assert checked(Constants, asdict(HERE), "") == HERE


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dtype: expected one of bfloat16, .*got 'int4'"):
        find(dtype="int4")


def test_a_write_that_fails_leaves_the_old_file(own_file: Path, monkeypatch) -> None:
    save([HERE], own_file)
    before = own_file.read_text()
    monkeypatch.setattr(Path, "replace", lambda *args: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        save([replace(HERE, threads=4)], own_file)
    assert own_file.read_text() == before
    assert os.listdir(own_file.parent) == [own_file.name]


def test_none_of_two_results_at_once_is_lost(own_file: Path, monkeypatch) -> None:
    other = Thread(target=save, args=([replace(HERE, threads=2)], own_file))

    def load_and_wait(path: Path) -> list[Constants]:
        monkeypatch.setattr(cost_store, "load", load)
        entries = load(path)
        other.start()
        other.join(1)  # it writes now, unless it waits for this one
        return entries

    monkeypatch.setattr(cost_store, "load", load_and_wait)
    save([HERE], own_file)
    other.join()
    assert {entry.threads for entry in load(own_file)} == {1, 2}


def test_a_lock_that_others_hold_loses_no_result(own_file: Path, monkeypatch) -> None:
    monkeypatch.setattr(whole_files, "_LOCK_SECONDS", 0.1)
    own_file.parent.mkdir()
    lock = os.open(own_file.parent, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    save([HERE], own_file)
    os.close(lock)
    assert load(own_file) == [HERE]


def test_where_the_users_file_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("VLLM_RELAY_DEVICES")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cost_store.user_file() == tmp_path / "vllm-relay" / "devices.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cost_store.user_file() == tmp_path / "home" / ".cache" / "vllm-relay" / "devices.json"


def test_json_is_what_people_can_read(own_file: Path) -> None:
    save([HERE], own_file)
    assert json.loads(own_file.read_text())[0]["stock"]["call"] == 1e-6


def test_a_link_in_the_place_of_the_draft_is_not_followed(
    own_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    monkeypatch.setattr(whole_files.secrets, "token_hex", lambda _: "1")
    own_file.parent.mkdir(parents=True, exist_ok=True)
    own_file.with_name(f"{own_file.name}.1").symlink_to(victim)
    with pytest.raises(OSError, match="File exists"):
        save([HERE], own_file)
    assert victim.read_text() == "mine"


def test_a_user_without_a_home_is_told_what_to_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    monkeypatch.delenv("VLLM_RELAY_DEVICES", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(ValueError, match=r"^there is no home folder; VLLM_RELAY_DEVICES names"):
        find_costs(8, 2, 64)


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        (
            "cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n",
            "AMD EPYC family 25 model 17",
        ),
        ("processor : 0\nmodel name\t: ARMv8 rev 1\n", "ARMv8 rev 1"),
    ],
)
def test_processors_of_one_name_have_names_of_their_own(
    cpuinfo: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(cost_store, "_CPUINFO", tmp_path / "cpuinfo")
    cost_store.cpu_name.cache_clear()
    try:
        assert cost_store.cpu_name() == name
        assert cost_store.cpu_name("vec", "avx2") == f"{name} (vec, avx2)"
    finally:
        cost_store.cpu_name.cache_clear()
