"""What gpu_check's parts op, engine and parity let pass, and what runs before what."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu import engine, op, parity, systems
from benchmarks.gpu.engine_systems import PARTS, SYSTEMS, SYSTEMS_V1
from benchmarks.gpu.journal import Clock, Journal, Selection, Wrong, run_cases
from benchmarks.gpu.parity_runs import RUNS, Run
from benchmarks.gpu.timing import Ceilings, DecodeStep
from benchmarks.harness.architectures import ARCHITECTURES

# 4 TB/s of reads, 800 TFLOP/s
CEILINGS = Ceilings(copy=3.9e12, read=4e12, matmul=8e14)


@pytest.mark.parametrize(
    ("us", "stock_us", "bars"),
    [
        (50.0, {"stock": 500.0, "stock-graphs": 400.0}, ("met", "met: >= 8 x stock-graphs")),
        (50.1, {"stock": 400.0, "stock-graphs": 500.0}, ("MISSED", "MISSED: >= 8 x stock")),
        (45.0, {}, ("met", "not judged, stock has no time: >= 8 x stock")),
    ],
)
def test_the_bar_of_the_op_is_judged_against_the_faster_stock(
    us: float, stock_us: dict[str, float], bars: tuple[str, str]
) -> None:
    for system, what in (("relay", "plan and attention"), ("relay-layer", "attention")):
        row = op.judged(op.BAR, system, us, 40.0, stock_us)
        assert row["bar"] == f"{bars[0]}: <= 1.25 x roofline ({what}); {bars[1]} ({what})"
        assert row.get("stock", "none") in bars[1] or not stock_us
    for system in ("stock", "stock-graphs", "relay-free", "relay-dense"):
        assert "bar" not in op.judged(op.BAR, system, us, 40.0, stock_us)
    assert "bar" not in op.judged(DecodeStep(8, 1024, 512), "relay", us, 40.0, stock_us)


def test_flashinfer_has_time_to_compile_until_it_has_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, asked = [100.0] * 3 + [300.0] * 20, []

    class Stepped(Clock):
        def left(self) -> float:
            return left.pop(0)

    def run(self: op.Bench, shape: DecodeStep, system: str) -> dict[str, Any]:
        self.compiled.add(system)
        return {}

    monkeypatch.setattr(op.Bench, "run", run)

    def cases() -> Any:
        for case in op.cases(quick=False):
            if case.name.endswith(" flashinfer"):
                asked.append(case.seconds)
                yield case

    left_out = run_cases(cases(), Journal(tmp_path / "op.csv", (), {}), Stepped(0))
    assert len(left_out) == 3
    assert asked[:4] == [180.0] * 4 and set(asked[4:]) == {15.0}


TIMED = engine.WINDOWS * engine.STEPS


def decoded(
    rate: float, relayed: int = 0, cascades: int = 0, replays: int = TIMED
) -> dict[str, Any]:
    rates = [rate * x for x in (0.9, 1.0, 1.1)]
    return {
        "rates": rates,
        "tokens": [[1]],
        "steps_relayed": relayed,
        "cascades": cascades,
        "replays": replays,
    }


def test_the_bars_of_the_engine_are_judged() -> None:
    stock, relay, cascade = SYSTEMS
    shared, alone = engine.make_case(64, 8192, 100), engine.make_case(64, 0, 100)
    others = {"stock": decoded(100.0)}

    def judge(system: Any, case: Any, row: Any, **more: Any) -> dict[str, Any]:
        return engine.judge(system, case, row, 1000.0, {**others, **more})

    found = judge(relay, shared, decoded(301, relayed=TIMED))
    assert (found["bar"], found["tok_s"]) == ("met: >= 3 x stock", 301.0)
    assert judge(relay, shared, decoded(299, relayed=TIMED))["bar"].startswith("MISSED")
    assert judge(relay, alone, decoded(97.9))["bar"] == "MISSED: >= 0.98 x stock"
    assert judge(relay, alone, decoded(98.1))["bar"].startswith("met")
    assert "bar" not in judge(stock, shared, decoded(100))
    slower = judge(cascade, shared, decoded(200, cascades=9, replays=0), relay=decoded(300))
    assert slower["bar"] == "met: relay >= cascade (1.500)"
    assert "bar" not in judge(cascade, shared, decoded(200), relay=decoded(100))
    # probes alone, a plan in eight steps, are not enough
    for case, relayed in ((shared, 0), (shared, TIMED // 8 + 2), (alone, 90)):
        with pytest.raises(Wrong, match=f"relayed {relayed} steps"):
            judge(relay, case, decoded(300, relayed=relayed))
    with pytest.raises(Wrong, match="ran 159 full CUDA graphs in 160 timed steps"):
        judge(relay, alone, decoded(100, replays=159))


def test_runner_v1_is_held_against_stock_on_runner_v1() -> None:
    relay, case = SYSTEMS_V1[1], engine.make_case(64, 0, 100)
    others = {"stock": decoded(100.0), "stock-v1": decoded(200.0)}
    assert relay.name == "relay-v1"
    found = engine.judge(relay, case, decoded(195), 1000.0, others)
    assert (found["times_stock"], found["bar"]) == (0.975, "MISSED: >= 0.98 x stock-v1")


def test_runner_v1_is_measured_last_and_without_sharing_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs: list[dict[str, Any]] = []

    def rows_of(spec: dict[str, Any], *_: Any) -> Any:
        specs.append(spec)
        yield from ({"name": case["name"], "left_out": True} for case in spec["cases"])

    monkeypatch.setattr(engine, "rows_of", rows_of)
    model, all_systems = PARTS["8b"]
    cases = [engine.make_case(*sizes, 100) for sizes in engine.CASES]
    journal = Journal(tmp_path / "engine.csv", engine.COLUMNS, {})
    clock = Clock(time.time() + 600)
    left_out = engine.run_model(
        model, tmp_path, list(all_systems), cases, CEILINGS, tmp_path, journal, clock
    )
    alone = [case for case in cases if not case["shared"]]
    assert [spec["cases"] for spec in specs] == [cases] * 3 + [alone] * 2
    assert [spec["engine"]["attention_backend"] for spec in specs[3:]] == ["FLASH_ATTN", "RELAY"]
    assert len(left_out) == 3 * len(cases) + 2 * len(alone)
    assert PARTS["7b"] == ("llama-2-7b", SYSTEMS)


def forced(
    offset: float,
    relayed: int,
    mode: str = "FULL",
    requests: int = 4,
    replays: int = 30,
    cached: int = 0,
) -> dict[str, Any]:
    logprobs = np.random.default_rng(0).normal(size=(requests, 32)) * 0.01 + offset
    return {
        "tokens": [[5] * 32] * requests,
        "logprobs": logprobs.tolist(),
        "steps_relayed": relayed,
        "cudagraph_mode": mode,
        "replays": replays,
        "cached": cached,
    }


def test_parity_is_judged() -> None:
    reference_row = {**forced(0, 0), "logprobs": np.zeros((4, 32)).tolist()}
    bound = (0.02, 0.06)

    def judge(system: str, row: dict[str, Any], groups: int = 2) -> dict[str, Any]:
        limit = None if system == "stock" else bound
        return parity.judge(parity.Run(system), {"groups": groups}, row, reference_row, limit)

    assert judge("stock", forced(0, 0), 0)["correct"] == "yes"
    assert judge("relay", forced(0, 30))["correct"] == "yes"
    assert judge("planted", forced(0.1, 30))["correct"] == "planted error seen"
    for system, row, groups, message in (
        ("relay", forced(0.1, 30), 2, "further from float32"),
        ("relay", forced(float("nan"), 30), 2, "further from float32"),
        ("relay", forced(0, 0), 2, "relayed 0 steps"),
        ("relay", forced(0, 5), 2, "relayed 5 steps"),  # probes of 32 steps
        ("relay", forced(0, 30), 0, "relayed 30 steps"),
        ("relay", forced(0, 30, "PIECEWISE"), 2, "no full CUDA graphs: PIECEWISE"),
        ("relay", forced(0, 30, replays=0), 2, "no full CUDA graphs: FULL, 0 ran"),
        ("planted", forced(0, 30), 2, "does not see"),
        ("stock", forced(1.0, 0), 2, "further from float32"),
        ("relay", {**forced(0, 30), "tokens": [[6] * 32] * 4}, 2, "forced tokens"),
    ):
        with pytest.raises(Wrong, match=message):
            judge(system, row, groups)


def test_prefixes_that_system_kvs_did_not_give_are_seen() -> None:
    run, exact = Run("relay", system_kv=True), forced(0, 0)
    case = {"groups": 2, "cacheable": 640}
    found = parity.judge(run, case, forced(0, 30, cached=640), exact, (0.02, 0.06))
    assert found["correct"] == "yes"
    with pytest.raises(Wrong, match="624 tokens were cached, not 640"):
        parity.judge(run, case, forced(0, 30, cached=624), exact, (0.02, 0.06))


def test_a_chosen_engine_runs_with_its_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def run_all(runs: list[Run], *_: Any) -> list[str]:
        ran.extend(run.name for run in runs)
        return []

    monkeypatch.setattr(parity, "run_all", run_all)
    journal, clock = Journal(tmp_path / "p.csv", parity.COLUMNS, {}), Clock(time.time() + 60)
    assert parity.run(journal, clock, Selection(["*fp8 relay", "gemma-2 * relay"]), False) == []
    assert ran == [
        "v2 graphs bfloat16 fp8 stock",
        "v2 graphs bfloat16 fp8 relay",
        "gemma-2 v2 graphs bfloat16 stock",
        "gemma-2 v2 graphs bfloat16 relay",
    ]


@pytest.mark.parametrize(("requests", "judged"), [(31, False), (32, True)])
def test_the_rarest_errors_are_judged_of_a_thousand_values_only(
    requests: int, judged: bool
) -> None:
    row = forced(0, 30, requests=requests)
    exact = {**row, "logprobs": np.zeros((requests, 32)).tolist()}
    for request in range(2):
        row["logprobs"][request][7] = 0.1  # more than one value in a thousand
    case = {"groups": 2}
    if judged:
        with pytest.raises(Wrong, match="further from float32") as wrong:
            parity.judge(Run("relay"), case, row, exact, (0.02, 0.06))
        assert wrong.value.row["bound_p999"] == "0.06"
    else:
        found = parity.judge(Run("relay"), case, row, exact, (0.02, 0.06))
        assert found["correct"] == "yes" and "bound_p999" not in found


def test_runs_have_their_measure_before_them_and_enough_steps() -> None:
    names = [run.name for run in RUNS]
    assert len(set(names)) == len(names)
    for i, run in enumerate(RUNS):
        if run.system != "stock":
            assert run.measure in RUNS[:i]
        # The steps that relay certainly runs, late as it may start, are told from those it may not.
        late = systems.PROBE_STEPS + systems.HEARD_AFTER
        for steps in (parity.QUICK_STEPS, parity.STEPS):
            assert steps - 1 - late > run.idle_steps(steps)
    planted = {(run.runner, run.graphs) for run in RUNS if run.system == "planted"}
    assert planted >= {("v2", True), ("v1", True), ("v2", False)}
    assert {run.model for run in RUNS} - {""} <= set(ARCHITECTURES)
    dense = next(run for run in RUNS if run.relay)
    config = parity.spec_of(dense, Path("model"), [])["engine"]["additional_config"]
    assert config == {"relay": {"min_saved_tokens": 0, "dense": True, "max_levels": 2}}
    assert dense.graphs and (dense.runner, dense.dtype) == ("v2", "bfloat16")
