"""Two ranks of a tensor-parallel group, in processes of their own, over gloo."""

import multiprocessing
from pathlib import Path
from typing import Any

import pytest


def _rank(rank: int, failing: int | None, folder: Path, found: Any) -> None:
    """Start a backend; what it decided goes to `found`."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.v1.attention.backends import flash_attn

    from tests import reference_flash
    from tests.triton.cuda.cuda_bench import Bench, Step, make_config

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
    found.put((rank, [layer.impl.refusal for layer in bench.layers], captures))


@pytest.mark.parametrize("failing", [None, 1])
def test_all_ranks_relay_or_none(
    tmp_path: Path, pytestconfig: pytest.Config, failing: int | None
) -> None:
    if pytestconfig.getoption("--vllm") is not None:
        pytest.skip("its ranks are those of the installed vLLM")
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    ranks = [context.Process(target=_rank, args=(i, failing, tmp_path, found)) for i in range(2)]
    for process in ranks:
        process.start()
    try:
        decided = {rank: rest for rank, *rest in (found.get(timeout=300) for _ in ranks)}
    finally:
        for process in ranks:
            process.terminate()
            process.join()
    if failing is None:
        assert all(rest == [[None, None], True] for rest in decided.values())
        return
    assert not any(captures for _, captures in decided.values())
    other, own = decided[0][0], decided[1][0]
    assert all("another rank" in refusal for refusal in other)
    assert all("out of memory" in refusal for refusal in own)
