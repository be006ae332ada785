"""Digests of a model's weights, own code, tokenizer and chat template.

They are taken from files, so a model is compared before an engine starts.
"""

import json
from pathlib import Path

import blake3

# vLLM's default loader, too, reads the files of the first pattern that matches.
WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("added_tokens.json", "special_tokens_map.json", "tokenizer_config.json"),
)
# Parts of tokenizer_config.json that change no token; the template has a digest of its own.
_NOT_TOKENIZER = ("chat_template", "name_or_path", "transformers_version", "model_max_length")


def digest_weights(model: Path) -> str:
    """BLAKE3 over all weight files of a model's folder, or one GGUF file, their names and sizes.

    Every byte is read: two checkpoints may differ in one tensor. On one core this takes a fraction
    of a second per GB in the page cache, and leaves the files there for the engine to load.

    Raises:
        FileNotFoundError: no weight files.
    """
    found = (sorted(model.glob(pattern)) for pattern in WEIGHT_PATTERNS)
    files = [model] if model.is_file() else next(filter(None, found), [])
    if not files:
        raise FileNotFoundError(f"{model}: no weight files ({', '.join(WEIGHT_PATTERNS)})")
    total = blake3.blake3()
    for file in files:
        one = blake3.blake3(max_threads=blake3.blake3.AUTO)
        one.update_mmap(file)
        total.update(f"{file.name}\0{file.stat().st_size}\0".encode() + one.digest())
    return total.hexdigest()


def digest_tokenizer(folder: Path) -> str | None:
    """BLAKE3 over the tokenizer's files, without the chat template; None if there are none."""
    total = blake3.blake3()
    paths = [path for path in map(folder.joinpath, TOKENIZER_FILES) if path.is_file()]
    for path in paths:
        content = path.read_bytes()
        if path.name == "tokenizer_config.json":
            config = json.loads(content)
            for key in _NOT_TOKENIZER:
                config.pop(key, None)
            content = json.dumps(config, sort_keys=True).encode()
        total.update(f"{path.name}\0{len(content)}\0".encode() + content)
    return total.hexdigest() if paths else None


def digest_code(model: Path) -> str | None:
    """BLAKE3 over the Python files of a model's folder, their names and sizes; None without any."""
    total = blake3.blake3()
    files = sorted(model.rglob("*.py"))
    for file in files:
        content = file.read_bytes()
        total.update(f"{file.relative_to(model)}\0{len(content)}\0".encode() + content)
    return total.hexdigest() if files else None


def digest_chat_template(template: str) -> str:
    """BLAKE3 of a chat template's text without white space at its ends."""
    return blake3.blake3(template.strip().encode()).hexdigest()


def default_chat_template(folder: Path) -> str | None:
    """The chat template in a tokenizer's folder, or None."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    config = folder / "tokenizer_config.json"
    template = json.loads(config.read_text()).get("chat_template") if config.is_file() else None
    if isinstance(template, list):  # several, by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template
