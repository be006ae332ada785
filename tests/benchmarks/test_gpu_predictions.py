"""The tables in docs/cuda.md are those of the newest CSVs and of the cost model as it is."""

from benchmarks.report import gpu_predictions as predicted
from vllm_relay.sharing.gpu import GPUS


def test_the_page_has_what_was_measured_and_what_the_model_predicts() -> None:
    text = predicted.PAGE.read_text()
    assert predicted.page(text) == text, "run benchmarks/report/gpu_predictions.py"


def test_gains_grow_with_the_prefix_and_the_requests() -> None:
    for gpu in GPUS.values():
        for model in predicted.MODELS.values():
            by_prefix = [predicted.gains(gpu, model, 64, shared) for shared in (1024, 8192, 65536)]
            by_rows = [predicted.gains(gpu, model, rows, 8192) for rows in (2, 32, 256)]
            for found in (by_prefix, by_rows):
                assert found == sorted(found)
                assert all(1 <= step <= attention for attention, step in found)


def test_a_step_reads_the_experts_that_its_tokens_choose() -> None:
    model = predicted.MODELS["gpt-oss-20b"]
    assert model.read(1) < model.read(64) < model.weights + model.experts
    assert model.held(64, 8192) > model.weights + model.experts
