"""Constants of devices, measured once: where the cost model's numbers come from.

`vllm-relay calibrate` measures a device and a head shape and keeps what it found in a file of the
user's; a file of the devices that we measured is part of the package. Constants are bandwidths and
rates, so that they also say something about head shapes that nobody measured.
"""

import json
import os
import platform
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from vllm_relay.sharing.cost import Costs, KernelCosts

SHIPPED = Path(__file__).with_name("devices.json")
# How much slower the relayed path is taken to be than its constants say, from measured constants
# and from those of another device or shape. The first is about what predictions of whole steps were
# off by in benchmarks/results/choice-*.csv (median); nobody can know the second.
MARGIN, MARGIN_OF_A_GUESS = 0.15, 0.3

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Kernel:
    """Constants of one kernel.

    Attributes:
        call: seconds per call. token: seconds per byte of queries.
        first: seconds per byte of KV read for the first time. read: and for each row that reads it.
        far: and in addition where a row's KV exceeds the cache.
        pair: seconds per floating point operation.
    """

    call: float
    token: float
    first: float
    read: float
    far: float
    pair: float


@dataclass(frozen=True)
class Constants:
    """What was measured on one device for one head shape; see `sharing.cost.Costs` for its parts.

    Attributes:
        device: its name, as `cpu_name` makes it. threads: of torch, in the engine's worker.
        heads, kv_heads, head_size, dtype: of the layers.
        cache: bytes of a core's own cache, which keys and values of one head fill.
        fusion: seconds per byte of a partial. step, level: seconds. copy: seconds per byte of KV.
        packed: system attention of copied segments, where it can do without; then one call has the
            rows in no group, too.
        measured: when and with what, in words.
    """

    device: str
    threads: int
    heads: int
    kv_heads: int
    head_size: int
    dtype: str
    cache: int
    stock: Kernel
    context: Kernel
    system: Kernel
    fusion: float
    step: float
    level: float
    copy: float
    measured: str = ""
    packed: Kernel | None = None

    def costs(self, heads: int, kv_heads: int, head_size: int, dtype: str) -> Costs:
        """The costs of a head shape, in seconds per KV token, query token and pair of them."""
        item = _BYTES[dtype]
        query, kv = heads * head_size * item, 2 * kv_heads * head_size * item
        flops = 4 * heads * head_size
        near = self.cache / (2 * head_size * item)

        def of(kernel: Kernel) -> KernelCosts:
            return KernelCosts(
                call=kernel.call,
                token=kernel.token * query,
                first=kernel.first * kv,
                read=kernel.read * kv,
                pair=kernel.pair * flops,
                far=kernel.far * kv,
                near=near,
            )

        return Costs(
            stock=of(self.stock),
            context=of(self.context),
            system=of(self.system),
            fusion=self.fusion * query,
            step=self.step,
            level=self.level,
            copy=self.copy * kv,
            packed=of(self.packed) if self.packed else None,
            # Its call is charged as that of the contexts.
            rest=replace(of(self.context), call=0.0) if self.packed else None,
        )

    def shape(self) -> tuple[str, int, int, int, int, str]:
        """What one measurement is for; a newer one takes its place."""
        return (
            self.device, self.threads, self.heads, self.kv_heads, self.head_size, self.dtype,
        )  # fmt: skip

    @classmethod
    def from_mapping(cls, given: Any) -> "Constants":
        """Read an entry of a file.

        Raises:
            ValueError: a field is missing, unknown, of another type, or a time below 0.
        """
        if not isinstance(given, dict):
            raise ValueError(f"expected an object, got {type(given).__name__}")
        values = dict(given)
        for name in ("stock", "context", "system"):
            values[name] = _checked(Kernel, values.get(name))
        if values.get("packed") is not None:
            values["packed"] = _checked(Kernel, values["packed"])
        return _checked(cls, values)


@dataclass(frozen=True)
class Found:
    """Costs of a head shape and how far to trust them.

    Attributes:
        margin: for `Costs.with_margin`. source: where they come from, in words. guessed: whether
            they were measured on another device or with another number of threads.
    """

    costs: Costs
    margin: float
    source: str
    guessed: bool


def find_costs(
    heads: int,
    kv_heads: int,
    head_size: int,
    *,
    device: str | None = None,
    dtype: str = "bfloat16",
    threads: int | None = None,
    files: Sequence[Path] | None = None,
) -> Found:
    """The best known costs of a head shape.

    Args:
        device: as `cpu_name` makes it; this machine where None. threads: any where None.
        files: where to look; of equals the first is taken. The user's, then the package's.

    Raises:
        ValueError: an unknown dtype, or a file that cannot be read; names it.
    """
    if dtype not in _BYTES:
        raise ValueError(f"dtype: expected one of {', '.join(_BYTES)}, got {dtype!r}")
    wanted = (heads, kv_heads, head_size)
    name = cpu_name() if device is None else device
    paths = (user_file(), SHIPPED) if files is None else files
    known = [(entry, path) for path in paths for entry in load(path)]

    def distance(item: tuple[Constants, Path]) -> tuple[bool, bool, float]:
        """Nearest first: the device, then its threads, then the shape."""
        entry, _ = item
        theirs = (entry.heads, entry.kv_heads, entry.head_size)
        ratios = (max(a, b) / min(a, b) for a, b in zip(wanted, theirs, strict=True))
        off = sum(ratio - 1 for ratio in ratios) + (entry.dtype != dtype)
        return (
            not _same_device(entry.device, name),
            threads is not None and entry.threads != threads,
            off,
        )

    if not known:
        raise ValueError(f"no measurements in {', '.join(map(str, paths))}")
    entry, path = min(known, key=distance)
    other, other_threads, off = distance((entry, path))
    where = "shipped with vllm-relay" if path == SHIPPED else str(path)
    shape = f"{entry.heads}/{entry.kv_heads} heads of {entry.head_size}"
    source = f"costs of {entry.device}{_with(entry.threads)}, {shape} ({where})"
    guessed = other or other_threads
    if guessed:
        source = f"{name}{_with(threads)} was not measured; {source} stand in"
    margin = MARGIN_OF_A_GUESS if guessed or off else MARGIN
    return Found(entry.costs(*wanted, dtype), margin, source, guessed)


def user_file() -> Path:
    """Where `vllm-relay calibrate` keeps what it measures; VLLM_RELAY_DEVICES names another."""
    named = os.environ.get("VLLM_RELAY_DEVICES")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "vllm-relay" / "devices.json"


def load(path: Path) -> list[Constants]:
    """The entries of a file; none where there is no file.

    Raises:
        ValueError: it cannot be read or is not what `save` writes; names it and what is wrong.
    """
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(given, list):
        raise ValueError(f"{path}: expected a list of measurements")
    entries = []
    for index, entry in enumerate(given):
        try:
            entries.append(Constants.from_mapping(entry))
        except ValueError as error:
            raise ValueError(f"{path}: measurement {index}: {error}") from None
    return entries


def save(new: Iterable[Constants], path: Path) -> None:
    """Add measurements to a file, in place of those of the same device and shape. Whole or not."""
    entries = {entry.shape(): entry for entry in [*load(path), *new]}
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        text = json.dumps([asdict(entry) for entry in entries.values()], indent=1)
        draft.write_text(text + "\n", encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def cache_bytes() -> int:
    """Bytes of a core's L2 cache; 1 MiB where the system does not tell."""
    told = Path("/sys/devices/system/cpu/cpu0/cache/index2/size")
    found = re.fullmatch(r"(\d+)([KM])\s*", told.read_text()) if told.exists() else None
    return int(found[1]) << (10 if found[2] == "K" else 20) if found else 1 << 20


@cache
def cpu_name(isa: str = "", kernels: str = "") -> str:
    """This machine's CPU and what its kernels are written for.

    Virtual machines often hide the model: the name alone may stand for several.

    Args:
        isa: as vLLM's CPU engine says. kernels: the instruction set of ours, or "torch".
    """
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    named = re.search(r"model name\s*:\s*(.+)", text)
    name = named[1].strip() if named else platform.processor() or platform.machine()
    return f"{name} ({', '.join(filter(None, (isa, kernels)))})" if isa else name


def _with(threads: int | None) -> str:
    if threads is None:
        return ""
    return f" with {threads} thread{'' if threads == 1 else 's'}"


def _same_device(entry: str, wanted: str) -> bool:
    """A name without an instruction set stands for all of that device's."""
    return entry == wanted or entry.rpartition(" (")[0] == wanted


def _checked(kind: type[Any], given: Any) -> Any:
    if not isinstance(given, dict):
        raise ValueError(f"{kind.__name__.lower()}: expected an object, got {given!r}")
    types = {field.name: field.type for field in fields(kind)}
    unknown, missing = set(given) - set(types), set(types) - set(given) - {"measured", "packed"}
    if unknown or missing:
        raise ValueError(f"unknown or missing: {', '.join(sorted(unknown | missing))}")
    for name, value in given.items():
        if types[name] is float and not (
            isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1
        ):
            raise ValueError(f"{name} must be seconds from 0 to 1, got {value!r}")
        if types[name] is int and not (type(value) is int and value >= 1):
            raise ValueError(f"{name} must be a whole number >= 1, got {value!r}")
        if types[name] is str and not isinstance(value, str):
            raise ValueError(f"{name} must be text, got {value!r}")
    return kind(**given)
