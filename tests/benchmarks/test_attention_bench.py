"""What `bench_attention.py` makes of times: rates, and whose errors count."""

import pytest

from benchmarks.harness.roofline import Machine
from benchmarks.suites import bench_attention

CEILING = {"threads": 2, "gemm_gflop_s": 100.0, "read_gb_s": 10.0, "instructions": "avx2"}


def rows(part: str, name: str, seconds: float) -> list[dict]:
    measured = {
        name: {"seconds": x, "least": x, "most": 2 * x, "rms_error": error}
        for name, x, error in (("vLLM", 2 * seconds, 1e-4), ("ours", seconds, 4e-4))
    }
    return bench_attention.rows_of(part, name, (8, 2, 64), measured, CEILING)


def test_rates_of_a_prefix_count_it_once_for_memory_and_for_every_request_in_arithmetic() -> None:
    stock, ours = rows("prefix", "32 x 8,192", 0.01)
    assert ours["gflop_s"] == round(4 * 8 * 64 * 32 * 8192 / 0.01 / 1e9, 1)
    assert ours["gb_s"] == round(2 * 2 * 2 * 64 * 8192 / 0.01 / 1e9, 4)
    assert (stock["times_as_fast_as_vllm"], ours["times_as_fast_as_vllm"]) == (1.0, 2.0)
    assert ours["of_gemm"] == round(4 * 8 * 64 * 32 * 8192 / 0.01 / 1e9 / 100, 3)
    assert (ours["times_vllms_error"], ours["threads"]) == (4.0, 2)
    assert ours["times_vllms_error"] > bench_attention.WRONG


def test_causal_queries_do_not_count_what_they_do_not_see() -> None:
    _, ours = rows("contexts", "8 x 1,024, 4 queries", 0.001)
    pairs = 8 * (1021 + 1022 + 1023 + 1024)
    assert ours["gflop_s"] == round(4 * 8 * 64 * pairs / 0.001 / 1e9, 1)
    assert ours["gb_s"] == round(2 * 2 * 2 * 64 * 8 * 1024 / 0.001 / 1e9, 4)


def test_the_bound_of_attention_counts_reads_and_arithmetic() -> None:
    heads = {"query_heads": 8, "kv_heads": 2, "head_size": 64}
    reads = Machine(gemm=1e30, read=1e9, **heads)
    # reads alone: eq. 10 without its constants
    assert reads.most(32, 8192, 64) == pytest.approx((8192 + 64) / (8192 / 32 + 64))
    products = Machine(gemm=1e9, read=1e30, **heads)
    assert products.most(32, 8192, 64) == pytest.approx(1)
    # A token's read takes 8 times its 4 products with a request's query heads.
    both = Machine(gemm=32e9, read=1e9, **heads)
    assert both.most(64, 8192, 0) == pytest.approx(8)
    assert both.most(4, 8192, 0) == pytest.approx(4)
