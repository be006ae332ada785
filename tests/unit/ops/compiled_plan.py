"""Compile the plan kernels for CUDA without a GPU; run by test_plan_triton.py."""

from typing import Any

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


if __name__ == "__main__":
    for capability in (80, 90):
        for levels in (1, 3):
            columns = {"CHUNK_C": launch.CHUNK_COLUMNS}
            rows = {"CHUNK_R": launch.CHUNK_ROWS}
            depths = {"CHECKPOINTS": launch.checkpoints(2048)}
            level = {"LEVEL": levels - 1}
            sizes = {
                **{"BLOCK_SIZE": 16, "LEVELS": levels, "DENSE": levels // 3},
                "STATS": launch.STATS,
            }
            for kernel, constants in (
                (launch.hash_prefixes_kernel, {**sizes, **depths, **columns}),
                (launch.match_leaders_kernel, {**level, **depths, **rows, **columns}),
                (launch.score_groups_kernel, {**level, **rows}),
                (launch.lay_out_kernel, {**sizes, **rows, **columns}),
            ):
                compile_for(capability, kernel, constants)
