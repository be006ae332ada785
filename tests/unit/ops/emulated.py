"""The CPU kernels in an emulated process, with the interface of `native.Library`.

A call's buffers are copied into memory that both processes share, each up to a page that the
kernels may not touch, and results are copied back.
"""

import ctypes
import mmap
import os
import subprocess
from bisect import bisect_right

import numpy as np

from tests.unit.ops.call_buffers import Buffer, buffers_of, operands_of, sequences_of
from vllm_relay.ops.native import library as native
from vllm_relay.ops.native.library import KEYS, TABLE, Call, Layout

PAGE = mmap.PAGESIZE
ADDRESS, BYTES = 0x2000_0000_0000, 1 << 30  # the shared memory in the emulated process
NAN = 0xFF  # of every byte: a NaN in each dtype, and a block id that does not exist


class EmulatedLibrary:
    """Kernels that run in `command`, an emulator and `arm_runner`; one thread, any number of parts.

    Raises:
        RuntimeError: a call ended the process, for example at a guard page. The next call starts
            another one.
    """

    parallel = None

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._file = os.memfd_create("arena")
        os.truncate(self._file, BYTES)
        self._memory = mmap.mmap(self._file, BYTES)
        self._at = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._isa: str | None = None
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [*self._command, str(self._file), str(ADDRESS), str(BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[self._file],
        )
        if self._isa:
            self.use_isa(self._isa)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()
        os.close(self._file)

    def _ask(self, *words: object) -> str:
        line = " ".join(map(str, words))
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        if not answer:
            status = self._process.wait()
            self._start()
            raise RuntimeError(f"the emulated kernels ended with status {status} in {words[0]}")
        return answer

    @property
    def isas(self) -> list[str]:
        return self._ask("isas").split()

    @property
    def isa(self) -> str:
        return self._ask("isa")

    def use_isa(self, name: str) -> None:
        if self._ask("use", name) != "1":
            raise ValueError(f"no instruction set {name!r}, only {', '.join(self.isas)}")
        self._isa = name

    def packed(self, dtype: int, head_size: int, tokens: int) -> tuple[Layout, int]:
        nbytes = int(self._ask("packed", dtype, head_size, tokens, ADDRESS))
        return Layout.from_buffer_copy(self._memory), nbytes

    def attend(self, call: Call) -> None:
        self._run("attend", call)

    def fuse(self, call: Call) -> None:
        self._run("fuse", call)

    def pack(self, call: Call, layout: Layout) -> None:
        self._run("pack", call, layout)

    def _run(self, function: str, call: Call, target: Layout | None = None) -> None:
        buffers = list(buffers_of(call, function))
        if target is not None:
            tokens = int(sequences_of(call)[0, KEYS])
            buffers += operands_of(call, target, tokens, written=True)
        arena = _Arena(self._at, buffers)
        words = [arena.put(_moved_call(call, arena))]
        if target is not None:
            words.append(arena.put(_moved_layout(target, arena)))
        code = int(self._ask(function, *words, *arena.guards))
        arena.copy_back()
        native._raise_error(code)


class _Arena:
    """Copies of a call's buffers in the shared memory; those that overlap stay together.

    Attributes:
        guards: pages behind the copies, addresses of the emulated process.
    """

    def __init__(self, memory: int, buffers: list[Buffer]) -> None:
        self._memory, self._used = memory, 0
        self.guards: list[int] = []
        self._buffers: list[Buffer] = []
        for x in sorted(buffers):
            last = self._buffers[-1] if self._buffers else None
            if last and x.start < last.stop:
                stop, written = max(last.stop, x.stop), last.written or x.written
                self._buffers[-1] = Buffer(last.start, stop, written)
            elif x.start < x.stop:
                self._buffers.append(x)
        self._starts = [x.start for x in self._buffers]
        self._places = [self._copy(x.start, x.stop - x.start) for x in self._buffers]

    def _copy(self, address: int, nbytes: int) -> int:
        """Offset of a copy that ends where a page ends; a guard page follows."""
        end = self._used + -(-nbytes // PAGE) * PAGE
        if end + PAGE > BYTES:
            raise MemoryError(f"the shared memory has {BYTES} bytes")
        start = end - nbytes
        ctypes.memset(self._memory + self._used, NAN, start - self._used)
        ctypes.memmove(self._memory + start, address, nbytes)
        self.guards.append(ADDRESS + end)
        self._used = end + PAGE
        return start

    def put(self, x: ctypes.Structure | ctypes.Array) -> int:
        """Address of a copy of x in the emulated process."""
        return ADDRESS + self._copy(ctypes.addressof(x), ctypes.sizeof(x))

    def put_array(self, x: np.ndarray) -> int:
        """Address of a copy of x in the emulated process."""
        return ADDRESS + self._copy(x.ctypes.data, x.nbytes)

    def moved(self, address: int | None) -> int:
        """Address in the emulated process of `address` in this one; 0 in no buffer."""
        index = bisect_right(self._starts, address or 0) - 1
        if index < 0 or address >= self._buffers[index].stop:
            return 0
        return ADDRESS + self._places[index] + address - self._starts[index]

    def copy_back(self) -> None:
        for place, x in zip(self._places, self._buffers, strict=True):
            if x.written:
                ctypes.memmove(x.start, self._memory + place, x.stop - x.start)


def _moved_layout(layout: Layout, arena: _Arena) -> Layout:
    moved = Layout.from_buffer_copy(layout)
    moved.k.base, moved.v.base = arena.moved(layout.k.base), arena.moved(layout.v.base)
    return moved


def _moved_call(call: Call, arena: _Arena) -> Call:
    """The call with the addresses of the emulated process."""
    moved = Call.from_buffer_copy(call)
    moved.parallel = None
    moved.q.base, moved.fused.base = arena.moved(call.q.base), arena.moved(call.fused.base)
    moved.places, moved.positions = arena.moved(call.places), arena.moved(call.positions)
    for name in ("slopes", "sinks"):
        setattr(moved.scores, name, arena.moved(getattr(call.scores, name)))
    partials = (native.Partial * call.num_partials)(*call.partials[: call.num_partials])
    for x in partials:
        x.out.base, x.lse.base = arena.moved(x.out.base), arena.moved(x.lse.base)
    layouts = [_moved_layout(x, arena) for x in call.layouts[: call.num_layouts]]
    sequences = sequences_of(call)
    sequences[:, TABLE] = [arena.moved(int(x)) for x in sequences[:, TABLE]]
    moved.partials = ctypes.cast(arena.put(partials), type(call.partials))
    moved.layouts = ctypes.cast(arena.put((Layout * len(layouts))(*layouts)), type(call.layouts))
    moved.sequences = arena.put_array(sequences)
    return moved
