"""What test_patches.py runs in processes of their own, against the installed or the patched vLLM.

Usage: ``python in_engine.py send|receive|platform|generate OUT.json [ARG ...]``. PYTHONPATH decides
which vLLM it meets; every answer names the one it met.
"""

import copy
import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATHS = {"PLAIN": "pkg.one.Backend", "SAME_PATH": "pkg.one.Backend", "BARE": "pkg.two.Backend"}


def send(pickles: str) -> dict[str, Any]:
    """Register members of both enums and write them, pickled in several ways, to `pickles`."""
    import cloudpickle
    from vllm.config.attention import AttentionConfig
    from vllm.v1.attention.backends.registry import (
        AttentionBackendEnum,
        MambaAttentionBackendEnum,
        register_backend,
    )

    members = []
    for enum, is_mamba in ((AttentionBackendEnum, False), (MambaAttentionBackendEnum, True)):
        for name in ("PLAIN", "SAME_PATH"):
            register_backend(name, PATHS[name], is_mamba=is_mamba)
        enum.register("BARE", PATHS["BARE"])  # adds the member, sets no override
        register_backend("DECORATED", is_mamba=is_mamba)(Path)
        members += [enum[name] for name in (*PATHS, "DECORATED")]
    dumps: list[Callable[[Any], bytes]] = [
        lambda m, p=p: pickle.dumps(m, protocol=p) for p in range(2, 6)
    ]
    dumps.append(cloudpickle.dumps)
    Path(pickles).write_bytes(
        pickle.dumps([[dump(member) for dump in dumps] for member in members])
    )
    builtin = AttentionBackendEnum.FLASH_ATTN
    return {
        "copies_are_identical": all(copy.deepcopy(m) is m and copy.copy(m) is m for m in members),
        "nested_copies_are_identical": all(copy.deepcopy({"x": [m]})["x"][0] is m for m in members),
        "loads_here": all(pickle.loads(pickle.dumps(m)) is m for m in members),
        "config_hash": AttentionConfig(backend=AttentionBackendEnum.PLAIN).compute_hash(),  # type: ignore[attr-defined]
        "builtin_pickle": [pickle.dumps(builtin, protocol=p).hex() for p in range(2, 6)],
    }


def receive(pickles: str) -> dict[str, Any]:
    """Unpickle in a process that registered nothing; then register, as a plugin does later."""
    from vllm.v1.attention.backends.registry import (
        AttentionBackendEnum,
        MambaAttentionBackendEnum,
        register_backend,
    )

    before = [list(enum.__members__) for enum in (AttentionBackendEnum, MambaAttentionBackendEnum)]
    found = []
    for ways in pickle.loads(Path(pickles).read_bytes()):
        try:
            loaded = [pickle.loads(way) for way in ways]
        except (ValueError, AttributeError) as error:
            found.append(f"{type(error).__name__}: {error}")
            continue
        first = loaded[0]
        same = all(member is first and type(first)[first.name] is first for member in loaded)
        path = first.get_path() if first.value or first.is_overridden() else None
        found.append([type(first).__name__, first.name, path, first.is_overridden(), same])
    again = []
    for path in (PATHS["PLAIN"], "pkg.other.Backend"):
        try:
            register_backend("PLAIN", path)
            again.append("accepted")
        except ValueError as error:
            again.append(str(error))
    return {"before": before, "found": found, "again": again}


def platform() -> dict[str, Any]:
    """What `CpuPlatform.get_attn_backend_cls` answers, by case: a class path, or the error."""
    import torch
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.attention.selector import AttentionSelectorConfig

    config = AttentionSelectorConfig(
        head_size=64, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=None
    )

    def ask(backend: Any, **changes: Any) -> str:
        try:
            return CpuPlatform.get_attn_backend_cls(backend, config._replace(**changes))
        except (ValueError, NotImplementedError) as error:
            return f"{type(error).__name__}: {error}"

    names = ("CPU_ATTN", "FLASH_ATTN", "TORCH_SDPA", "CUSTOM")
    answers = {name: ask(AttentionBackendEnum[name]) for name in names} | {"None": ask(None)}
    register_backend(AttentionBackendEnum.CUSTOM, "tiny_backend.TinyBackend")
    answers["CUSTOM overridden"] = ask(AttentionBackendEnum.CUSTOM)
    answers["sparse"] = ask(AttentionBackendEnum.CUSTOM, use_sparse=True)
    answers["mla"] = ask(AttentionBackendEnum.CUSTOM, use_mla=True)
    register_backend(AttentionBackendEnum.FLASH_ATTN, "tiny_backend.TinyBackend")
    answers["FLASH_ATTN overridden"] = ask(AttentionBackendEnum.FLASH_ATTN)
    register_backend(AttentionBackendEnum.CUSTOM, "tiny_backend.PickyBackend")
    answers["picky"] = ask(AttentionBackendEnum.CUSTOM)
    register_backend(AttentionBackendEnum.CUSTOM, "no_such_module.Backend")
    answers["missing"] = ask(AttentionBackendEnum.CUSTOM)
    if hasattr(AttentionBackendEnum, "register"):
        register_backend("TINY", "tiny_backend.TinyBackend")
        answers["registered"] = ask(AttentionBackendEnum["TINY"])
        AttentionBackendEnum.register("TINY_BARE", "tiny_backend.TinyBackend")
        answers["registered, no override"] = ask(AttentionBackendEnum["TINY_BARE"])
    return answers


def generate(model: str) -> dict[str, Any]:
    """Two greedy answers over one shared prefix, by `relay` in a spawned engine process."""
    from vllm import LLM, SamplingParams

    facts = " ".join(
        f"Box {i} holds {3 * i + 1} coins and stands in room {i % 7}." for i in range(40)
    )
    prompts = [
        f"{facts} Question: {question} Answer:"
        for question in ("What is in box 5?", "Where is box 9?")
    ]
    llm = LLM(
        model=model,
        attention_backend="relay",
        enforce_eager=True,
        dtype="float32",  # greedy answers of two runs then part at no near tie
        max_model_len=1024,
        max_num_seqs=4,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=8)
    llm.generate(
        prompts[:1], sampling, use_tqdm=False
    )  # so that the second prompt finds the prefix in the cache
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return {
        "texts": [o.outputs[0].text for o in outputs],
        "counters": llm.collective_rpc("relay_counters")[0],
    }


if __name__ == "__main__":
    import vllm

    command, out, *arguments = sys.argv[1:]
    commands = {"send": send, "receive": receive, "platform": platform, "generate": generate}
    answer = commands[command](*arguments)
    Path(out).write_text(json.dumps({"vllm": vllm.__file__} | answer))
