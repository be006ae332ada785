"""The layers of a CUDA engine, as ``vllm-relay doctor`` tells them."""

from types import SimpleNamespace

from tests.triton.cuda.cuda_bench import HEADS, KV_HEADS, Bench, make_config
from vllm_relay.backend import cuda_support
from vllm_relay.backend.layer_report import LayerReporter


def reported(bench: Bench) -> list[tuple[str | None, list[int | None]]]:
    """Why each layer is not relayed, and from when sharing pays for 16 and 64 tokens."""
    group = SimpleNamespace(
        get_metadata_builder=lambda: bench.builder,
        layer_names=[layer.layer_name for layer in bench.layers],
    )
    worker = LayerReporter()
    worker.model_runner = SimpleNamespace(attn_groups=[[group]])
    worker.vllm_config = bench.config
    layers = worker.report_layers([16, 64], most=8)
    assert [layer["name"] for layer in layers] == group.layer_names
    assert {(layer["heads"], layer["kv_heads"]) for layer in layers} == {(HEADS, KV_HEADS)}
    return [(layer["reason"], layer["pays_from"]) for layer in layers]


def test_layers_are_reported_with_reasons_or_what_pays(folder, monkeypatch) -> None:
    bench = Bench(make_config(folder, min_saved_tokens=100))
    assert reported(bench) == [(None, [8, 3])] * 2
    off = Bench(make_config(folder, enabled=False))
    assert reported(off) == [("switched off by additional_config", [])] * 2

    def fail(*_) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(cuda_support, "minimums", fail)
    assert reported(Bench(make_config(folder))) == [("its start failed", [])] * 2
