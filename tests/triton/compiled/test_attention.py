"""The Triton attention kernels compile for CUDA without a GPU and without spilled registers."""

import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_relay.ops.attention.triton import _tile
from vllm_relay.ops.attention.triton_kernel import attend_kernel
from vllm_relay.ops.fusion.triton import _merge_kernel

# Bytes that a program may use; sm_86 and sm_89 have the least of those that run sm_80 code.
SHARED = {80: 99 * 1024, 90: 227 * 1024}


def compiled(kernel, capability, signature, constants, ones, **options):
    """Down to a cubin. `ones` names the strides that are 1: those of dense channels."""
    at = {name: i for i, name in enumerate(kernel.arg_names)}
    sixteen = []
    for name, kind in signature.items():
        if isinstance(kind, tuple):
            sixteen += [(at[name], i) for i, part in enumerate(kind) if part == "i32"]
        elif kind.startswith("*"):
            sixteen.append((at[name],))
    source = ASTSource(
        kernel,
        signature=signature | dict.fromkeys(constants, "constexpr"),
        constexprs=constants | {(at[name], i): 1 for name, i in ones.items()},
        # As in every launch on torch's own tensors: without it, no load is wide.
        attrs={path: [["tt.divisibility", 16]] for path in sixteen},
    )
    done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(done.asm["cubin"])
        tool = triton.knobs.nvidia.cuobjdump.path
        usage = subprocess.check_output([tool, "-res-usage", cubin], text=True)
    # Registers that do not suffice are kept on the stack, in slow memory.
    assert "STACK:0 " in usage, (signature, constants, usage)
    return done


def attend(
    capability, dtype, head_size, rows, block_size=16, causal=False, one_tile=True, splits=1
):
    """As the launcher calls it for 16-bit or 32-bit floats and four query heads per KV head."""
    itemsize = 4 if dtype == "fp32" else 2
    options = _tile(rows, head_size, itemsize)
    tile = {name: options.pop(name) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_D")}
    four = ("i32", "i32", "i32", "constexpr")
    signature = {
        "q_ptr": f"*{dtype}",
        "k_ptr": f"*{dtype}",
        "v_ptr": f"*{dtype}",
        "table_ptr": "*i32",
        "lens_ptr": "*i32",
        "starts_ptr": "*i32",
        "out_ptr": f"*{dtype}" if splits == 1 else "*fp32",
        "lse_ptr": "*fp32",
        "q_strides": four[1:],
        "k_strides": four,
        "v_strides": four,
        "table_strides": ("i32", "constexpr"),
        "out_strides": four,
        "lse_strides": four[1:],
        **dict.fromkeys(("groups", "tokens", "keys"), "i32"),
        "score_scale": "fp32",
    }
    ones = {"q_strides": 2, "k_strides": 3, "v_strides": 3, "table_strides": 1}
    ones |= {"out_strides": 3, "lse_strides": 2}
    constants = {"HEAD_SIZE": head_size, "HEADS_PER_KV": 4, "BLOCK_SIZE": block_size, **tile}
    constants |= {"CAUSAL": causal, "ONE_TILE": one_tile}
    done = compiled(attend_kernel, capability, signature, constants, ones, **options)
    assert done.metadata.shared <= SHARED[capability], (constants, done.metadata.shared)


def merge(capability, dtype, head_size):
    signature = {"out_ptr": f"*{dtype}", "lse_ptr": "*fp32", "outs_ptr": "*fp32"}
    signature |= {"lses_ptr": "*fp32", **dict.fromkeys(("splits", "tokens", "heads"), "i32")}
    constants = {"HEAD_SIZE": head_size, "BLOCK_H": 16, "BLOCK_D": 128}
    compiled(_merge_kernel, capability, signature, constants, {})


CASES = {
    "dense": {"head_size": 128, "rows": 256, "block_size": 0},
    "groups": {"head_size": 128, "rows": 256, "one_tile": False, "splits": 4},
    "decode": {"head_size": 128, "rows": 4, "splits": 8},
    "fp32-causal": {"dtype": "fp32", "head_size": 256, "rows": 64, "causal": True, "splits": 2},
    "fp32-dense": {"dtype": "fp32", "head_size": 64, "rows": 16, "block_size": 0},
}


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", CASES)
def test_attention_compiles(name, capability):
    attend(capability, **{"dtype": "bf16", **CASES[name]})


@pytest.mark.parametrize("capability", [80, 90])
def test_merge_compiles(capability):
    merge(capability, "bf16", 96)


def test_extend_compiles():
    attend(90, "fp16", 64, 64, causal=True, one_tile=False)


@pytest.mark.parametrize(("head_size", "more"), [(96, {"causal": True}), (256, {"block_size": 0})])
def test_odd_and_large_heads_compile(head_size, more):
    attend(80, "bf16", head_size, 64, **more)
