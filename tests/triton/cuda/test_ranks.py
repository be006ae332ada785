"""Two ranks of a tensor-parallel group, in processes of their own, over gloo."""

import multiprocessing
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.engine_sources import folder_of

FAILING = (None, 1)  # the rank whose attention fails


def _rank(rank: int, folder: Path, release: str | None, found: Any) -> None:
    """Start a backend per case of `FAILING`; what each decided goes to `found`."""
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
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(
            2, rank, f"file://{folder / 'store'}", rank, backend="gloo"
        )
        parallel_state.initialize_model_parallel(2)
    cuda_support.predicted_minimum = lambda builder, graphs: 100 + 10 * rank
    step = Step([([5, 6, 70], 40, 1), ([5, 6, 71], 45, 1)], 4)
    decided = []
    for failing in FAILING:
        if rank == failing:
            flash_attn.flash_attn_varlen_func = broken
        bench = Bench(config)
        # A graph with relay has other collectives around it than one without.
        captures = getattr(bench.build(step, capture=True), "plan", None) is not None
        minimums = cuda_support.minimums(bench.builder, RelayConfig())
        decided.append(([layer.impl.refusal for layer in bench.layers], captures, minimums))
    found.put((rank, decided))


def test_all_ranks_relay_or_none(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    release = pytestconfig.getoption("--vllm")
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    ranks = [context.Process(target=_rank, args=(i, tmp_path, release, found)) for i in range(2)]
    for process in ranks:
        process.start()
    try:
        decided = dict(found.get(timeout=300) for _ in ranks)
    finally:
        for process in ranks:
            process.terminate()
            process.join()
    # Of a threshold that each rank has measured, all take the largest.
    assert all(case[2] == (110, 110) for cases in decided.values() for case in cases)
    (good, other), (good_too, own) = decided[0], decided[1]
    assert good[:2] == good_too[:2] == ([None, None], True)
    assert other[1] is own[1] is False
    assert all("another rank" in refusal for refusal in other[0])
    assert all("out of memory" in refusal for refusal in own[0])
