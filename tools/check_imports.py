"""Hold the import rules of the package, from the source alone.

    python tools/check_imports.py [ROOT]

1. Layers: a room imports its own layer and lower ones only:
   ``cli -> system_kv, backend, plugin, bench -> metrics -> sharing, ops, config``.
2. ``sharing`` is pure: neither torch nor ``ops``.
3. What can be read, tested and reused without vLLM never imports it, not even inside a function.

Prints each offending ``file:line`` and exits with 1 if there is one.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "vllm_relay"
LAYERS = {
    "sharing": 0,
    "ops": 0,
    "config": 0,
    "metrics": 1,
    "backend": 2,
    "bench": 2,
    "plugin": 2,
    "system_kv": 2,
    "cli": 3,
}
WITHOUT_VLLM = ("sharing", "ops", "config", "metrics", "system_kv.file", "bench")
# module -> prefixes that it may not import, with the reason
FORBIDDEN = {
    **{name: {"vllm": "must work without vLLM"} for name in WITHOUT_VLLM},
    "sharing": {
        "vllm": "must work without vLLM",
        "torch": "sharing is plain Python and NumPy",
        f"{PACKAGE}.ops": "sharing does not know the kernels",
    },
}


def within(module: str, prefix: str) -> bool:
    """True if `module` is `prefix` or lies in it."""
    return module == prefix or module.startswith(prefix + ".")


def imported_modules(tree: ast.Module, package: str) -> Iterator[tuple[int, str]]:
    """(line, absolute name) of everything that `tree`, a module of `package`, imports anywhere.

    ``from a import b`` yields ``a`` and ``a.b``: b may be a module.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            yield node.lineno, base
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def objection(module: str, target: str) -> str | None:
    """Why `module` (dotted, inside the package) may not import `target` (absolute), or None."""
    for name, rules in FORBIDDEN.items():
        if within(module, name):
            for prefix, reason in rules.items():
                if within(target, prefix):
                    return reason
    if not target.startswith(PACKAGE + "."):
        return None
    room, other = module.split(".")[0], target.split(".")[1]
    if room in LAYERS and other in LAYERS and LAYERS[other] > LAYERS[room]:
        return f"{room} lies below {other}"
    return None


def check(root: Path) -> list[str]:
    """The offending imports below `root`/vllm_relay, one line of text each."""
    found = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        package = ".".join(parts[:-1])
        module = ".".join(part for part in parts[1:] if part != "__init__")
        seen: set[tuple[int, str]] = set()
        for line, target in imported_modules(ast.parse(path.read_text(), str(path)), package):
            reason = objection(module, target)
            if reason is not None and (line, reason) not in seen:
                seen.add((line, reason))
                found.append(f"{path.relative_to(root)}:{line}: imports {target}: {reason}")
    return found


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    if not (root / PACKAGE).is_dir():
        sys.exit(f"check_imports: no {PACKAGE} in {root}")
    found = check(root)
    print("\n".join(found) if found else "check_imports: the rules hold")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
