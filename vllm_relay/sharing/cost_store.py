"""The cost store: measured constants of devices.

`vllm-relay calibrate` measures a device and a head shape and keeps the constants in the user's
file; a file of measured devices is part of the package. Constants are bandwidths and rates, so that
they hold for other head shapes, too.
"""

import json
import os
import platform
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, PlainValidator, StrictStr, create_model, with_config

from vllm_relay.sharing.cost import Costs, KernelCosts
from vllm_relay.sharing.gpu import find_gpu, gpu_costs, is_gpu
from vllm_relay.sharing.whole_files import locked, replacing
from vllm_relay.validation import Amount, Positive, checked, parse_json

SHIPPED = Path(__file__).with_name("devices.json")
_CPUINFO = Path("/proc/cpuinfo")
# Safety margin of our kernels' predictions against vLLM's, for a measured shape and for another
# device or shape. Both kernels were timed interleaved: most of what is off in one is off in the
# other. The second is a guess.
MARGIN, MARGIN_OF_A_GUESS = 0.05, 0.3

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1}


# Seconds per unit of work, as a file may state them.
Seconds = Annotated[Amount, Field(lt=1)]
# In a file no term is left out.
_TERMS: dict[str, Any] = {term.name: (Seconds, ...) for term in fields(KernelCosts)}
_KERNEL = create_model("Kernel", __config__=ConfigDict(extra="forbid"), **_TERMS)


def _kernel(given: Any) -> KernelCosts:
    return KernelCosts(**dict(_KERNEL.model_validate(given)))


Kernel = Annotated[KernelCosts, PlainValidator(_kernel)]


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, kw_only=True)
class Constants:
    """Measurements of one device and one head shape; see `sharing.cost.Costs` for its parts.

    Kernels cost seconds per call, per byte of queries, per byte of KV, and per floating point
    operation.

    Attributes:
        device: name, as `cpu_name` makes it, or a GPU's. threads: of torch, in the engine's worker;
            1 on a GPU.
        heads, kv_heads, head_size, dtype: of the layers.
        cache: bytes of a core's own cache, which keys and values of one head fill; on a GPU, of
            L2, which those of all heads fill.
        fusion: seconds per byte of a partial. step, level: seconds. copy: seconds per byte of KV.
        measured: date and version.
    """

    device: StrictStr
    threads: Positive
    heads: Positive
    kv_heads: Positive
    head_size: Positive
    dtype: StrictStr
    cache: Positive
    stock: Kernel
    context: Kernel
    system: Kernel
    packed: Kernel
    fusion: Seconds
    step: Seconds
    level: Seconds
    copy: Seconds
    measured: StrictStr = ""

    def costs(self, heads: int, kv_heads: int, head_size: int, dtype: str) -> Costs:
        """The costs of a head shape, in seconds per KV token, query token and pair of them."""
        item = _BYTES[dtype]
        query, kv = heads * head_size * item, 2 * kv_heads * head_size * item
        per_token = {"token": query, "first": kv, "read": kv, "far": kv}
        per_token["pair"] = 4 * heads * head_size
        return Costs(
            stock=self.stock.scaled(**per_token),
            context=self.context.scaled(**per_token),
            system=self.system.scaled(**per_token),
            packed=self.packed.scaled(**per_token),
            near=self.cache / (kv if is_gpu(self.device) else 2 * head_size * item),
            evicts=not is_gpu(self.device),
            fusion=self.fusion * query,
            step=self.step,
            level=self.level,
            copy=self.copy * kv,
            margin=0.0 if is_gpu(self.device) else MARGIN,
        )

    def shape(self) -> tuple[str, int, int, int, int, str, str]:
        """Key of a measurement, its versions included; a newer one of the same key replaces it."""
        versions = self.measured.partition(", ")[2]
        return (
            self.device, self.threads, self.heads, self.kv_heads, self.head_size, self.dtype,
            versions,
        )  # fmt: skip


@dataclass(frozen=True)
class Found:
    """Costs of a head shape and their trust.

    Attributes:
        margin: for `Costs.with_margin`. source: origin, in words. guessed: True if measured on
            another device or with another number of threads.
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
        device: as `cpu_name` makes it, or a GPU's name; this machine where None.
        threads: any where None.
        files: searched in order, the first of equals is taken; the user's, then the package's where
            None.

    Raises:
        ValueError: an unknown dtype, or a file that cannot be read; names it.
    """
    if dtype not in _BYTES:
        raise ValueError(f"dtype: expected one of {', '.join(_BYTES)}, got {dtype!r}")
    wanted = (heads, kv_heads, head_size)
    name = cpu_name() if device is None else device
    paths = (user_file(), SHIPPED) if files is None else files
    known = [(entry, path) for path in paths for entry in load(path)]

    def distance(item: tuple[Constants, Path]) -> tuple[int, bool, float]:
        """Sort key: the device (0, 1: a variant of the GPU, 2: another), its threads, the shape."""
        entry, _ = item
        variant = gpu is not None and gpu == find_gpu(entry.device)
        theirs = (entry.heads, entry.kv_heads, entry.head_size)
        ratios = (max(a, b) / min(a, b) for a, b in zip(wanted, theirs, strict=True))
        off = sum(ratio - 1 for ratio in ratios) + (entry.dtype != dtype)
        return (
            0 if _same_device(entry.device, name) else 2 - variant,
            threads is not None and entry.threads != threads,
            off,
        )

    gpu = find_gpu(name)
    best = min(known, key=distance, default=None)
    if gpu is not None and (best is None or distance(best)[0] == 2):
        costs = gpu_costs(gpu[1], *wanted, _BYTES[dtype])
        source = f"costs of an NVIDIA {gpu[0]} by its data sheet, an estimate"
        return Found(costs, MARGIN_OF_A_GUESS, source, guessed=True)
    if best is None:
        raise ValueError(f"no measurements in {', '.join(map(str, paths))}")
    entry, path = best
    other, other_threads, off = distance(best)
    where = "shipped with vllm-relay" if path == SHIPPED else str(path)
    shape = f"{entry.heads}/{entry.kv_heads} heads of {entry.head_size}"
    with_threads = "" if is_gpu(entry.device) else _with(entry.threads)
    source = f"costs of {entry.device}{with_threads}, {shape} ({where})"
    guessed = bool(other) or other_threads
    if guessed:
        source = f"{name}{_with(threads)} was not measured; {source} stand in"
    margin = MARGIN_OF_A_GUESS if guessed or off else MARGIN
    return Found(entry.costs(*wanted, dtype), margin, source, guessed)


def user_file() -> Path:
    """The file that `vllm-relay calibrate` writes. ValueError for a user without a home."""
    if named := os.environ.get("VLLM_RELAY_DEVICES"):
        return Path(named)
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        raise ValueError("there is no home folder; VLLM_RELAY_DEVICES names a file") from None
    return Path(base) / "vllm-relay" / "devices.json"


def load(path: Path) -> list[Constants]:
    """The entries of a file; none where there is no file.

    Raises:
        ValueError: an unreadable file, or not one that `save` writes; names it and the reason.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ValueError(f"{path}: {error}") from None
    return checked(list[Constants], parse_json(content, f"{path}: "), f"{path}: ")


def save(new: Iterable[Constants], path: Path) -> None:
    """Add measurements to a file, before others and in place of those of the same key.

    Whole or not.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.parent):
        save_locked(new, path)


def save_locked(new: Iterable[Constants], path: Path) -> None:
    """`save` for a process that has the lock of the file's folder."""
    newest = {entry.shape(): entry for entry in new}
    older = [entry for entry in load(path) if entry.shape() not in newest]
    text = json.dumps([asdict(entry) for entry in (*newest.values(), *older)], indent=1)
    with replacing(path) as draft:
        draft.write_text(text + "\n", encoding="utf-8")


def check_writable(path: Path) -> None:
    """Raise OSError or ValueError, as `save` would; changes no file."""
    load(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path):
        pass  # a draft without content takes no place


@cache
def cpu_name(isa: str = "", kernels: str = "") -> str:
    """This machine's CPU and the instruction sets in use.

    Virtual machines often hide the model's name, so that one name stands for several processors:
    the numbers that x86 has for its families and models tell them apart.

    Args:
        isa: of vLLM's CPU engine. kernels: of ours.
    """
    text = _CPUINFO.read_text() if _CPUINFO.exists() else ""
    known = dict(re.findall(r"^(model name|cpu family|model)\s*:\s*(.+?)\s*$", text, re.MULTILINE))
    name = known.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in known:
        name += f" family {known['cpu family']} model {known['model']}"
    return f"{name} ({', '.join(filter(None, (isa, kernels)))})" if isa else name


def _with(threads: int | None) -> str:
    if threads is None:
        return ""
    return f" with {threads} thread{'' if threads == 1 else 's'}"


def _same_device(entry: str, wanted: str) -> bool:
    """True if both name one device; without an instruction set a name stands for all of them."""
    return entry == wanted or entry.rpartition(" (")[0] == wanted
