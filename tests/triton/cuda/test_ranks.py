"""Two ranks of a tensor-parallel group, in processes of their own, over gloo."""

import multiprocessing
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.engine_sources import folder_of


def _rank(rank: int, failing: int | None, folder: Path, release: str | None, found: Any) -> None:
    """Start a backend; what it decided goes to `found`."""
    if release is not None:
        sys.path.insert(0, str(folder_of(release)))
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.v1.attention.backends import flash_attn

    from tests import reference_flash
    from tests.triton.cuda.cuda_bench import Bench, Step, make_config
    from vllm_relay.backend import cuda_support
    from vllm_relay.config import RelayConfig

    def broken(**kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    reference_flash.install(lambda name, value: setattr(flash_attn, name, value))
    config = make_config(folder / str(rank))
    config.parallel_config.tensor_parallel_size = 2
    config.parallel_config.rank = rank
    if rank == failing:
        flash_attn.flash_attn_varlen_func = broken
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(
            2, rank, f"file://{folder / 'store'}", rank, backend="gloo"
        )
        parallel_state.initialize_model_parallel(2)
    bench = Bench(config)
    step = Step([([5, 6, 70], 40, 1), ([5, 6, 71], 45, 1)], 4)
    # A graph with relay has other collectives around it than one without.
    captures = getattr(bench.build(step, capture=True), "plan", None) is not None
    cuda_support.predicted_minimum = lambda builder, graphs: 100 + 10 * rank
    minimums = cuda_support.minimums(bench.builder, RelayConfig())
    found.put((rank, [layer.impl.refusal for layer in bench.layers], captures, minimums))


@pytest.mark.parametrize("failing", [None, 1])
def test_all_ranks_relay_or_none(
    tmp_path: Path, pytestconfig: pytest.Config, failing: int | None
) -> None:
    release = pytestconfig.getoption("--vllm")
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    ranks = [
        context.Process(target=_rank, args=(i, failing, tmp_path, release, found)) for i in range(2)
    ]
    for process in ranks:
        process.start()
    try:
        decided = {rank: rest for rank, *rest in (found.get(timeout=300) for _ in ranks)}
    finally:
        for process in ranks:
            process.terminate()
            process.join()
    # Of a threshold that each rank has measured, all take the largest.
    assert all(minimums == (110, 110) for *_, minimums in decided.values())
    if failing is None:
        assert all(rest[:2] == [[None, None], True] for rest in decided.values())
        return
    assert not any(captures for _, captures, _ in decided.values())
    other, own = decided[0][0], decided[1][0]
    assert all("another rank" in refusal for refusal in other)
    assert all("out of memory" in refusal for refusal in own)
