"""The plan kernels compile for CUDA without a GPU."""

from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_relay.ops.planning import launch

LONG = ("hash_ptr", "score_ptr", "report_ptr")  # int64


def compile_for(capability: int, kernel: Any, constants: dict[str, Any]) -> None:
    """Down to a cubin, with the types that the launcher passes."""
    signature = {
        name: "constexpr"
        if name in constants
        else ("*i64" if name in LONG else "*i32")
        if name.endswith("_ptr")
        else "i32"
        for name in kernel.arg_names
    }
    source = ASTSource(kernel, signature=signature, constexprs=constants)
    assert triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]


def cases(levels: int) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Kernel and constants, by name; three levels are compiled with dense segments, too."""
    rows, columns = {"CHUNK_R": launch.CHUNKS_OF_ROWS[-1]}, {"CHUNK_C": launch.CHUNK_COLUMNS}
    depths, level = {"CHECKPOINTS": launch.checkpoints(2048)}, {"LEVEL": levels - 1}
    sizes = {"BLOCK_SIZE": 16, "LEVELS": levels, "DENSE": levels // 3, "STATS": launch.STATS}
    return {
        "hash_prefixes": (
            launch.hash_prefixes_kernel,
            sizes | depths | columns | {"WINDOW": 4096 * (levels // 3)},
        ),
        "match_leaders": (launch.match_leaders_kernel, level | depths | rows | columns),
        "score_groups": (launch.score_groups_kernel, level | rows),
        "keep_groups": (launch.keep_groups_kernel, level | rows),
        "lay_out": (launch.lay_out_kernel, sizes | rows | columns),
    }


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("levels", [1, 3])
@pytest.mark.parametrize("kernel", sorted(cases(1)))
def test_plan_compiles(kernel, levels, capability):
    compile_for(capability, *cases(levels)[kernel])
