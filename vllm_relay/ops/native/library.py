"""The C++ kernels in csrc/: found, loaded with ctypes, and their structs (csrc/abi.h).

They run on the OpenMP threads that PyTorch runs on, through the entry point of its own runtime, so
there is no second pool, and the engine's binding of threads to cores holds.
"""

import ctypes
import importlib.util
import logging
import os
from ctypes import POINTER, Structure, c_char_p, c_double, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
ROWS, ACROSS, PANELS = range(3)
# Tokens that panels are padded to, and that a block's size is a multiple of where it is packed.
PIECE = 32
_ERRORS = {
    1: (ValueError, "a block id lies outside the cache"),
    2: (MemoryError, "out of memory"),
}
_ISA = "VLLM_RELAY_CPU_ISA"
_logger = logging.getLogger("vllm.relay")


class Operand(Structure):
    """Where one operand lies: ``relay_operand``."""

    _fields_ = (
        ("base", c_void_p),
        ("stride", c_int64),
        ("panel", c_int64),
        ("head", c_int64),
        ("block", c_int64),
        ("kind", c_int64),
    )


class Layout(Structure):
    """Keys and values: ``relay_layout``."""

    _fields_ = (("k", Operand), ("v", Operand), ("block_tokens", c_int64), ("blocks", c_int64))


# ``relay_sequence``, adjacent queries and what they attend to, is a row of an int64 array with
# these columns: arrays are filled faster than structs.
FIRST, QUERIES, KEYS, CAUSAL, PARTIAL, LAYOUT, TABLE = range(7)


class Call(Structure):
    """``relay_call``."""

    _fields_ = (
        ("dtype", c_int64),
        ("out_dtype", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_size", c_int64),
        ("tokens", c_int64),
        ("partials", c_int64),
        ("threads", c_int64),
        ("scale", c_double),
        ("q", c_void_p),
        ("q_token", c_int64),
        ("q_head", c_int64),
        ("places", c_void_p),
        ("out", c_void_p),
        ("out_partial", c_int64),
        ("out_token", c_int64),
        ("out_head", c_int64),
        ("lse", c_void_p),
        ("lse_partial", c_int64),
        ("lse_head", c_int64),
        ("lse_token", c_int64),
        ("layouts", POINTER(Layout)),
        ("sequences", c_void_p),
        ("num_layouts", c_int64),
        ("num_sequences", c_int64),
        ("fused", c_void_p),
        ("fused_token", c_int64),
        ("fused_head", c_int64),
        ("parallel", c_void_p),
    )


class FuseCall(Structure):
    """``relay_fuse_call``."""

    _fields_ = (
        ("dtype", c_int64),
        ("fused_dtype", c_int64),
        ("tokens", c_int64),
        ("heads", c_int64),
        ("head_size", c_int64),
        ("partials", c_int64),
        ("threads", c_int64),
        ("outs", POINTER(c_void_p)),
        ("lses", POINTER(c_void_p)),
        ("out_token", POINTER(c_int64)),
        ("out_head", POINTER(c_int64)),
        ("lse_token", POINTER(c_int64)),
        ("lse_head", POINTER(c_int64)),
        ("places", c_void_p),
        ("fused", c_void_p),
        ("fused_token", c_int64),
        ("fused_head", c_int64),
        ("parallel", c_void_p),
    )


class Library:
    """The loaded library; OSError or AttributeError where it does not fit this module."""

    def __init__(self, path: str) -> None:
        functions = ctypes.CDLL(path)
        sizes = (c_int64 * 5)()
        functions.relay_sizes(sizes)
        mine = [ctypes.sizeof(x) for x in (Operand, Layout, Call, FuseCall)]
        if list(sizes) != [*mine[:2], 8 * (TABLE + 1), *mine[2:]]:
            raise OSError(f"{path} was built from other sources: install vllm-relay again")
        functions.relay_isas.restype = functions.relay_isa.restype = c_char_p
        functions.relay_use_isa.argtypes = (c_char_p,)
        functions.relay_attend.argtypes = (POINTER(Call),)
        functions.relay_fuse.argtypes = (POINTER(FuseCall),)
        functions.relay_packed.argtypes = (c_int64, c_int64, c_int64, POINTER(Layout))
        functions.relay_packed.restype = c_int64
        functions.relay_pack.argtypes = (
            *(c_int64, c_int64, c_int64, POINTER(Layout), c_void_p, POINTER(Layout)),
            *(c_int64, c_void_p),
        )
        for name in ("relay_attend", "relay_fuse", "relay_pack"):
            getattr(functions, name).restype = c_int
        self._functions = functions
        self.parallel = _openmp()

    @property
    def isas(self) -> list[str]:
        """Instruction sets that were compiled and that this machine has, best first."""
        return str(self._functions.relay_isas().decode()).split()

    @property
    def isa(self) -> str:
        """The one in use."""
        return str(self._functions.relay_isa().decode())

    def use_isa(self, name: str) -> None:
        """Use another one; what was packed before is of no use then.

        Raises:
            ValueError: it was not compiled, or the machine lacks it.
        """
        if not self._functions.relay_use_isa(name.encode()):
            raise ValueError(f"{name!r} is no instruction set here; there are {self.isas}")

    def attend(self, call: Call) -> None:
        self._check(self._functions.relay_attend(call))

    def fuse(self, call: FuseCall) -> None:
        self._check(self._functions.relay_fuse(call))

    def packed(self, dtype: int, head_size: int, tokens: int) -> tuple[Layout, int]:
        """The layout of packed keys and values, and the bytes of each of the two per KV head."""
        layout = Layout()
        return layout, int(self._functions.relay_packed(dtype, head_size, tokens, layout))

    def pack(
        self,
        dtype: int,
        head_size: int,
        kv_heads: int,
        source: Layout,
        sequence: int,
        target: Layout,
    ) -> None:
        """Pack what a sequence, at this address, attends to."""
        self._check(
            self._functions.relay_pack(
                *(dtype, head_size, kv_heads, source, sequence, target),
                *(torch.get_num_threads(), self.parallel),
            )
        )

    @staticmethod
    def _check(error: int) -> None:
        if error:
            kind, text = _ERRORS[error]
            raise kind(f"CPU kernels: {text}")


def _openmp() -> int | None:
    """Address of GOMP_parallel in the runtime that torch uses; GNU's, LLVM's and Intel's have it.

    None: there is none, and the kernels use one thread.
    """
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    # As torch's own calls are resolved: first what is preloaded, then what torch was linked with.
    for place in (None, str(library)):
        try:
            return ctypes.cast(ctypes.CDLL(place).GOMP_parallel, c_void_p).value
        except (OSError, AttributeError):
            continue
    return None


@cache
def library() -> Library | str:
    """The kernels, or why they cannot be used, which is also said, once."""
    wanted = os.environ.get(_ISA)
    if wanted == "none":
        return f"{_ISA}=none"
    spec = importlib.util.find_spec("vllm_relay.ops.native._kernels")
    reason = "vllm-relay was installed without them: no C++ compiler"
    try:
        if spec is not None and spec.origin is not None:
            found, reason = Library(spec.origin), ""
    except (OSError, AttributeError) as error:
        reason = str(error)
    if reason:
        _logger.warning("relay: PyTorch's CPU kernels are used, not our own: %s", reason)
        return reason
    if wanted:
        try:
            found.use_isa(wanted)
        except ValueError as error:
            raise ValueError(f"{_ISA}: {error}") from None
    return found


def loaded() -> Library:
    """The kernels; ValueError says why they cannot be used."""
    found = library()
    if isinstance(found, str):
        raise ValueError(found)
    return found


def unusable(dtype: torch.dtype, head_size: int) -> str | None:
    """Why the kernels cannot compute attention of these, or None."""
    found = library()
    if isinstance(found, str):
        return found
    if dtype not in DTYPES:
        return f"needs bfloat16, float16 or float32, not {dtype}"
    if head_size % 16 or not 16 <= head_size <= 256:
        return f"needs a head size that is a multiple of 16 up to 256, not {head_size}"
    return None


def packs_pairs_of_16(dtype: torch.dtype) -> bool:
    """Whether packed panels are of 16 columns and pairs of steps."""
    layout, _ = loaded().packed(DTYPES[dtype], 16, PIECE)
    return layout.k.stride == 32


def operand(x: Tensor, tokens: int, channels: int, heads: int, blocks: int | None) -> Operand:
    """Where keys lie, as the kernels see them; values have ROWS and ACROSS the other way round.

    Args:
        x: keys or values. tokens, channels, heads, blocks: which dims of x these are; tokens or
            channels are adjacent in memory.
    """
    strides = x.stride()
    adjacent = strides[channels] == 1
    return Operand(
        base=x.data_ptr(),
        stride=strides[tokens] if adjacent else strides[channels],
        head=strides[heads],
        block=0 if blocks is None else strides[blocks],
        kind=ACROSS if adjacent else ROWS,
    )


def layout_of(k: Tensor, v: Tensor, paged: bool) -> Layout:
    """Of keys and values ``[S, Hkv, D]``, or, paged, ``[num_blocks, block_size, Hkv, D]``."""
    dims = (1, 3, 2, 0) if paged else (0, 2, 1, None)
    keys, values = operand(k, *dims), operand(v, *dims)
    values.kind = ROWS if values.kind == ACROSS else ACROSS
    return Layout(keys, values, k.shape[1] if paged else 0, k.shape[0] if paged else 0)


def readable(x: Tensor, tokens: int) -> bool:
    """Whether the kernels can read keys or values: tokens (that dim) or channels are adjacent."""
    return x.stride(-1) == 1 or x.stride(tokens) == 1
