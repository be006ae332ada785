"""The estimated costs of a GPU, and the threshold that its planner takes from them."""

from dataclasses import replace

import numpy as np
import pytest

from tests.unit.sharing.forests import find_forest
from vllm_relay.sharing import reads
from vllm_relay.sharing.cost import gpu_costs, min_saved_tokens

BLOCK_SIZE = 16


def test_the_threshold_is_what_the_memory_delivers_in_the_time_of_a_group() -> None:
    # 2 TB/s for 20 us are 40 MB; K and V of 8 heads of 128 in two bytes are 4 KiB a token.
    assert min_saved_tokens(gpu_costs(4096, 2e12)) == pytest.approx(40e6 / 4096, abs=1)
    assert min_saved_tokens(gpu_costs(4096, 4e12)) == pytest.approx(80e6 / 4096, abs=1)
    costs = gpu_costs(4096, 2e12)
    half = replace(costs, system=replace(costs.system, call=1e-5))
    assert min_saved_tokens(half) == pytest.approx(20e6 / 4096, abs=1)


@pytest.mark.parametrize("tokens", [1, 64, 1000])
def test_costs_in_reads_give_back_their_threshold(tokens: int) -> None:
    assert min_saved_tokens(reads(tokens)) == tokens


def test_free_reads_have_no_threshold() -> None:
    with pytest.raises(ValueError, match=r"^costs: "):
        min_saved_tokens(gpu_costs(0, 2e12))


@pytest.mark.parametrize("rows", [2, 5])
def test_the_policy_of_the_host_has_the_same_threshold(rows: int) -> None:
    costs = gpu_costs(4096, 2e12)
    needed = -(-min_saved_tokens(costs) // ((rows - 1) * BLOCK_SIZE))
    for blocks, pays in ((needed - 1, False), (needed + 1, True)):
        table = np.arange(1, rows * (blocks + 1) + 1, dtype=np.int32).reshape(rows, -1)
        table[:, :blocks] = table[0, :blocks]
        computed = np.full(rows, blocks * BLOCK_SIZE, dtype=np.int32)
        assert bool(find_forest(table, computed, BLOCK_SIZE, costs).levels) == pays
