"""The C++ CPU kernels of csrc/: the library, loaded with ctypes, and its structs (csrc/abi.h).

The kernels run on PyTorch's OpenMP threads, through its runtime's own entry point: there is no
second pool, and the engine's binding of threads to cores holds.
"""

import ctypes
import logging
import os
from collections.abc import Iterable
from ctypes import POINTER, Array, Structure, c_char_p, c_double, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
ROWS, ACROSS, PANELS = range(3)
# Tokens: packed panels are padded to a multiple of it, and only KV blocks of a multiple are packed.
PIECE = 32
_ERRORS = {
    1: (ValueError, "a block id lies outside the KV cache"),
    2: (MemoryError, "out of memory"),
}
_ISA = "VLLM_RELAY_CPU_ISA"
_logger = logging.getLogger("vllm.relay")


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class Operand(Structure):
    """``relay_operand``: address and strides of keys or values."""

    _fields_ = (("base", c_void_p), *_fields(c_int64, "stride panel head block kind"))


class Layout(Structure):
    """``relay_layout``: keys and values."""

    _fields_ = (*_fields(Operand, "k v"), *_fields(c_int64, "block_tokens blocks"))


# Columns of an int64 array ``[n, 8]`` whose rows are ``relay_sequence``: adjacent query tokens and
# the keys that they attend to. An array is filled faster than structs.
FIRST, QUERIES, KEYS, CAUSAL, START, PARTIAL, LAYOUT, TABLE = range(8)


class Rows(Structure):
    """``relay_rows``: address and strides of ``[tokens, heads, ...]``."""

    _fields_ = (("base", c_void_p), *_fields(c_int64, "token head"))

    @classmethod
    def of(cls, x: Tensor) -> "Rows":
        return cls(x.data_ptr(), x.stride(0), x.stride(1))


class Partial(Structure):
    """``relay_partial``: one attention result."""

    _fields_ = _fields(Rows, "out lse")

    @classmethod
    def array(cls, outs: Iterable[Tensor], lses: Iterable[Tensor]) -> "Array[Partial]":
        """Partials out ``[T, H, D]``, lse ``[H, T]`` float32; the caller keeps the tensors."""
        found = []
        for out, lse in zip(outs, lses, strict=True):
            found.append(cls(Rows.of(out), Rows(lse.data_ptr(), lse.stride(1), lse.stride(0))))
        return (cls * len(found))(*found)


class Scores(Structure):
    """``relay_scores``: how a layer makes scores of products."""

    _fields_ = (
        *_fields(c_double, "scale softcap"),
        ("window", c_int64),
        *_fields(c_void_p, "slopes sinks"),
    )


class Call(Structure):
    """``relay_call``: attention of sequences, fusion of partials, or packing."""

    _fields_ = (
        *_fields(c_int64, "dtype partial_dtype heads kv_heads head_size tokens threads"),
        ("scores", Scores),
        *_fields(Rows, "q fused"),
        *_fields(c_void_p, "places positions"),
        ("partials", POINTER(Partial)),
        ("layouts", POINTER(Layout)),
        ("sequences", c_void_p),
        *_fields(c_int64, "num_partials num_layouts num_sequences"),
        ("parallel", c_void_p),
    )


def _raise_error(code: int) -> None:
    if code:
        kind, text = _ERRORS[code]
        raise kind(f"CPU kernels: {text}")


class Library:
    """The loaded library. Its calls raise ValueError where a block id lies outside the KV cache.

    Attributes:
        attend: attends to every sequence of a `Call` and, if it says so, fuses their partials.
        fuse: fuses the partials of a `Call`.
        pack: packs the keys and values of the sequence of a `Call` into a `Layout`.

    Raises:
        OSError, AttributeError, ValueError: the file is no library, or one of other sources.
    """

    def __init__(self, path: str) -> None:
        functions = ctypes.CDLL(path)
        sizes = [ctypes.sizeof(x) for x in (Operand, Layout, Partial, Scores, Call)]
        sizes.insert(2, 8 * (TABLE + 1))
        if list((c_int64 * len(sizes)).in_dll(functions, "relay_sizes")) != sizes:
            raise OSError(f"{path} was built from other sources: install vllm-relay again")
        functions.relay_isas.restype = functions.relay_isa.restype = c_char_p
        functions.relay_use_isa.argtypes = (c_char_p,)
        functions.relay_packed.argtypes = (c_int64, c_int64, c_int64, POINTER(Layout))
        functions.relay_packed.restype = c_int64
        self.attend, self.fuse = functions.relay_attend, functions.relay_fuse
        self.pack = functions.relay_pack
        self.attend.argtypes = self.fuse.argtypes = (POINTER(Call),)
        self.pack.argtypes = (POINTER(Call), POINTER(Layout))
        for function in (self.attend, self.fuse, self.pack):
            function.restype = _raise_error
        self._functions = functions
        self.parallel = _openmp()

    @property
    def isas(self) -> list[str]:
        """Instruction sets that the library and this machine have, best first."""
        return str(self._functions.relay_isas().decode()).split()

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        return str(self._functions.relay_isa().decode())

    def use_isa(self, name: str) -> None:
        """Use another instruction set, if there is; segments packed before cannot be read then."""
        if not self._functions.relay_use_isa(name.encode()):
            raise ValueError(f"no instruction set {name!r}, only {', '.join(self.isas)}")

    def packed(self, dtype: int, head_size: int, tokens: int) -> tuple[Layout, int]:
        """Strides of packed keys and values, and the bytes of each of the two per KV head."""
        layout = Layout()
        return layout, int(self._functions.relay_packed(dtype, head_size, tokens, layout))


def _openmp() -> int | None:
    """Address of GOMP_parallel in torch's OpenMP runtime; None, for one thread, if it has none."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    # GNU's, LLVM's or Intel's. Torch's own calls look into preloaded libraries, then linked ones.
    for place in (None, str(library)):
        try:
            return ctypes.cast(ctypes.CDLL(place).GOMP_parallel, c_void_p).value
        except (OSError, AttributeError):
            continue
    return None


@cache
def library() -> Library | str:
    """The kernels, or the reason why there are none, which is also logged, once.

    ValueError where VLLM_RELAY_CPU_ISA names an instruction set that machine or library lacks.
    """
    wanted = os.environ.get(_ISA)
    if wanted == "none":
        return f"{_ISA}=none"
    path = Path(__file__).with_name("_kernels.so")
    try:
        if not path.exists():
            raise OSError("vllm-relay was installed without them (no C++ compiler)")
        found = Library(str(path))
    except (OSError, AttributeError, ValueError) as error:
        _logger.warning("relay: no CPU kernels, every step is vLLM's own: %s", error)
        return str(error)
    if wanted:
        try:
            found.use_isa(wanted)
        except ValueError as error:
            raise ValueError(f"{_ISA}: {error}") from None
    return found


def loaded() -> Library:
    """The kernels; ValueError with the reason where there are none."""
    found = library()
    if isinstance(found, str):
        raise ValueError(found)
    return found


def unusable(dtype: torch.dtype, head_size: int) -> str | None:
    """The reason why the kernels cannot compute attention of these, or None."""
    found = library()
    if isinstance(found, str):
        return found
    if dtype not in DTYPES:
        return f"needs bfloat16, float16 or float32, not {dtype}"
    if head_size % 16 or not 16 <= head_size <= 512:
        return f"needs a head size that is a multiple of 16 up to 512, not {head_size}"
    return None


def packs_pairs_of_16(dtype: torch.dtype) -> bool:
    """True if packed panels have 16 columns and pairs of steps, as the engine's AMX blocks do."""
    layout, _ = loaded().packed(DTYPES[dtype], 16, PIECE)
    return layout.k.stride == 32


def layout_of(k: Tensor, v: Tensor, paged: bool) -> Layout:
    """Layout of keys and values ``[S, Hkv, D]`` or, paged, ``[num_blocks, block_size, Hkv, D]``."""
    if not paged:
        k, v = k[None], v[None]
    keys, values = _operand(k, (ACROSS, ROWS)), _operand(v, (ROWS, ACROSS))
    return Layout(keys, values, k.shape[1] if paged else 0, k.shape[0])


def _operand(x: Tensor, kinds: tuple[int, int]) -> Operand:
    """kinds: of ``x [num_blocks, block_size, Hkv, D]`` with adjacent channels, adjacent tokens."""
    block, token, head, channel = x.stride()
    stride, kind = (token, kinds[0]) if channel == 1 else (channel, kinds[1])
    return Operand(base=x.data_ptr(), stride=stride, head=head, block=block, kind=kind)


def readable(x: Tensor, tokens: int) -> bool:
    """True if tokens (this dim of x) or channels (the last) are adjacent, as the kernels need."""
    return x.stride(-1) == 1 or x.stride(tokens) == 1
