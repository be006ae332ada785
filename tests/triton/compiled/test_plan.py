"""The plan kernels compile for CUDA without a GPU."""

from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_relay.ops.planning import kernels as plan

LONG = ("hash_ptr", "best_ptr", "report_ptr")  # int64


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
    sizes = {"CHUNK_R": 1024, "CHUNK_C": plan.CHUNK_COLUMNS}
    depths = plan.checkpoints(2048)
    common = {"BLOCK_SIZE": 16, "LEVELS": levels, "DENSE": levels // 3, "STATS": plan.STATS}
    level = {"LEVEL": levels - 1}
    sign = {**common, "CHECKPOINTS": depths, "CHUNK_C": plan.CHUNK_COLUMNS}
    return {
        "sign": (plan.sign_kernel, sign),
        "match": (plan.match_kernel, {**level, "CHECKPOINTS": depths, **sizes}),
        "score": (plan.score_kernel, {**level, "CHUNK_R": 1024}),
        "settle": (plan.settle_kernel, {**common, **sizes}),
    }


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("levels", [1, 3])
@pytest.mark.parametrize("kernel", ["sign", "match", "score", "settle"])
def test_plan_compiles(kernel, levels, capability):
    compile_for(capability, *cases(levels)[kernel])
