"""Memory between pages that may not be touched: an overrun is a signal."""

import ctypes
import math
import mmap
from collections.abc import Sequence

import torch

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_NONE, _PAGE = 0, mmap.PAGESIZE


class Guards:
    """Tensors between guard pages; they live until `free`."""

    def __init__(self) -> None:
        self._mapped: list[tuple[int, int]] = []

    def tensor(
        self, shape: Sequence[int], dtype: torch.dtype, *, at_end: bool = True, align: int = 1
    ) -> torch.Tensor:
        """A dense tensor of zeros that ends (or begins) at a guard page.

        ``align``: bytes of which its address is a multiple; up to as many are between its end and
        the page.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        inner = max(1, -(-nbytes // _PAGE)) * _PAGE
        address = _libc.mmap(
            None, inner + 2 * _PAGE, _NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0
        )
        assert address not in (None, ctypes.c_void_p(-1).value), "out of mappings"
        self._mapped.append((address, inner + 2 * _PAGE))
        start = address + _PAGE
        assert _libc.mprotect(start, inner, mmap.PROT_READ | mmap.PROT_WRITE) == 0
        if at_end:
            start += inner - -(-nbytes // align) * align
        data = (ctypes.c_char * max(1, nbytes)).from_address(start)
        whole = torch.frombuffer(data, dtype=torch.uint8)
        return whole[:nbytes].view(dtype).view(tuple(shape))

    def free(self) -> None:
        while self._mapped:
            _libc.munmap(*self._mapped.pop())
