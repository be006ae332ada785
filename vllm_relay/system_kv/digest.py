"""Digests of what KV depends on: the weights, the tokenizer, the chat template.

They are taken from files, so that a model can be compared before an engine is started.
"""

import json
from pathlib import Path

import blake3

# The first pattern that matches is what vLLM's default loader reads, too.
WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
)
# Parts of tokenizer_config.json that do not change a token: the template has a digest of its own.
_NOT_TOKENIZER = ("chat_template", "name_or_path", "transformers_version", "model_max_length")


def digest_weights(model: Path) -> str:
    """BLAKE3 over all weight files of a model, their names and sizes.

    Every byte is read: two checkpoints may differ in one tensor. On one core this takes a fraction
    of a second per GB in the page cache, and leaves the files there for the engine to load.

    Args:
        model: the model's folder, or one GGUF file.

    Returns:
        64 hexadecimal digits.

    Raises:
        FileNotFoundError: no weight files.
    """
    files = [model] if model.is_file() else _weight_files(model)
    if not files:
        raise FileNotFoundError(f"{model}: no weight files ({', '.join(WEIGHT_PATTERNS)})")
    total = blake3.blake3()
    for file in files:
        one = blake3.blake3(max_threads=blake3.blake3.AUTO)
        one.update_mmap(file)
        total.update(f"{file.name}\0{file.stat().st_size}\0".encode() + one.digest())
    return total.hexdigest()


def _weight_files(folder: Path) -> list[Path]:
    for pattern in WEIGHT_PATTERNS:
        if files := sorted(folder.glob(pattern)):
            return files
    return []


def digest_tokenizer(folder: Path) -> str | None:
    """BLAKE3 over the tokenizer's files, or None when the folder holds none of them.

    The chat template does not count: `digest_chat_template` is for it.
    """
    total = blake3.blake3()
    found = False
    for name in TOKENIZER_FILES:
        path = folder / name
        if not path.is_file():
            continue
        found = True
        content = path.read_bytes()
        if name == "tokenizer_config.json":
            config = json.loads(content)
            for key in _NOT_TOKENIZER:
                config.pop(key, None)
            content = json.dumps(config, sort_keys=True).encode()
        total.update(f"{name}\0{len(content)}\0".encode() + content)
    return total.hexdigest() if found else None


def digest_chat_template(template: str) -> str:
    """BLAKE3 of a chat template's text, white space at its ends aside."""
    return blake3.blake3(template.strip().encode()).hexdigest()


def default_chat_template(folder: Path) -> str | None:
    """The chat template that a tokenizer's folder brings along, or None."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    config = folder / "tokenizer_config.json"
    template = json.loads(config.read_text()).get("chat_template") if config.is_file() else None
    if isinstance(template, list):  # several, by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template
