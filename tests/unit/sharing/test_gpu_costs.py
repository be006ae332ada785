"""The estimated costs of a GPU, and the threshold that its planner takes from them."""

from dataclasses import replace

import numpy as np
import pytest

from tests.unit.sharing.forests import find_forest
from vllm_relay.sharing import KernelCosts, StepShape, build_trie, reads
from vllm_relay.sharing.cost import Costs, min_saved_tokens, predict, predict_stock
from vllm_relay.sharing.cost_store import find_costs
from vllm_relay.sharing.gpu import GPUS, GRAPH_CALL, Gpu, find_gpu, gpu_costs

BLOCK_SIZE = 16
# K and V of 8 heads of 128 in two bytes are 4 KiB a token.
LLAMA_8B = (32, 8, 128)
PLAIN = Gpu(memory=1e12, l2=24 << 20, l2_rate=2e12, in_step=1e12, products=1e15)
IN_STEP = replace(PLAIN, in_step=2e12)


def attention(shared: int, rows: int, costs: Costs) -> tuple[float, float]:
    """Seconds of vLLM's own attention and of ours, for a shared prefix and nothing else."""
    blocks = shared // BLOCK_SIZE
    table = np.tile(np.arange(1, blocks + 1, dtype=np.int32), (rows, 1))
    lens = np.full(rows, shared, dtype=np.int32)
    step = StepShape(build_trie(table, lens, BLOCK_SIZE), BLOCK_SIZE, lens, np.ones_like(lens))
    return predict_stock(step, costs), predict(
        find_forest(table, lens, BLOCK_SIZE, costs), step, costs
    )


def test_a_prefix_inside_l2_is_read_from_there_by_all_but_the_first() -> None:
    costs = gpu_costs(PLAIN, *LLAMA_8B)
    stock, ours = attention(4096, 32, costs)
    assert stock == pytest.approx(4096 * 4096 * (1 / 1e12 + 31 / 2e12))
    products = 4 * 32 * 128 * 32 * 4096 / 0.6e15
    assert ours == pytest.approx(GRAPH_CALL + 4096 * 4096 / 1e12 + products)
    # Beyond it all read from memory: the gain grows faster than the prefix.
    long, ours_long = attention(65536, 32, costs)
    assert 65536 * 4096 * 32 / 1e12 * 0.9 < long < 65536 * 4096 * 33 / 1e12
    assert long / ours_long > 1.5 * stock / ours
    # Some serve requests in step.
    long, _ = attention(65536, 32, gpu_costs(IN_STEP, *LLAMA_8B))
    assert long == pytest.approx(65536 * 4096 * (1 / 1e12 + 31 / 2e12))


def test_gpus_are_found_by_the_names_that_torch_has_for_them() -> None:
    for name, key in (
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("nvidia l40s", "L40S"),
        ("B200", "B200"),
    ):
        assert find_gpu(name) == (key, GPUS[key])
    for name in ("NVIDIA L40", "AMD EPYC 9B14", "NVIDIA H1000", ""):
        assert find_gpu(name) is None
    for gpu in GPUS.values():
        assert gpu.memory <= gpu.in_step <= gpu.l2_rate < gpu.products / 10


def test_explain_takes_a_gpu_for_a_device() -> None:
    found = find_costs(*LLAMA_8B, device="H200")
    assert found.guessed and "NVIDIA H200 by its data sheet, an estimate" in found.source
    assert found.costs == gpu_costs(GPUS["H200"], *LLAMA_8B)


def test_the_threshold_is_what_l2_delivers_in_the_time_of_a_group() -> None:
    costs = gpu_costs(PLAIN, *LLAMA_8B)
    # 2 TB/s in 35 us are 70 MB.
    assert min_saved_tokens(costs) == pytest.approx(70e6 / 4096, abs=1)
    half = replace(costs, system=replace(costs.system, call=1e-5))
    assert min_saved_tokens(half) == pytest.approx(20e6 / 4096, abs=1)


@pytest.mark.parametrize("tokens", [1, 64, 1000])
def test_costs_in_reads_give_back_their_threshold(tokens: int) -> None:
    assert min_saved_tokens(reads(tokens)) == tokens


def test_free_reads_have_no_threshold() -> None:
    free = KernelCosts()
    with pytest.raises(ValueError, match=r"^costs: "):
        min_saved_tokens(Costs(stock=free, context=free, system=free))


@pytest.mark.parametrize("rows", [2, 5])
def test_the_policy_of_the_host_has_the_same_threshold(rows: int) -> None:
    # Without the products of a group, and with all in L2: no other term.
    costs = gpu_costs(replace(PLAIN, products=1e30, l2=1 << 40), *LLAMA_8B)
    needed = -(-min_saved_tokens(costs) // ((rows - 1) * BLOCK_SIZE))
    for blocks, pays in ((needed - 1, False), (needed + 1, True)):
        table = np.arange(1, rows * (blocks + 1) + 1, dtype=np.int32).reshape(rows, -1)
        table[:, :blocks] = table[0, :blocks]
        computed = np.full(rows, blocks * BLOCK_SIZE, dtype=np.int32)
        assert bool(find_forest(table, computed, BLOCK_SIZE, costs).levels) == pays
