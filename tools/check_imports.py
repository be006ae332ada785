"""The import rules of the package, checked from its source alone.

    python tools/check_imports.py [ROOT]

1. The graph of module imports has no cycle. Imports inside functions count; imports for type
   checkers do not.
2. A room imports its own layer and lower ones only, see `LAYERS`; ``sharing`` is pure Python.
3. Only `MAY_IMPORT_VLLM` imports vLLM, and only `MAY_IMPORT_COMPAT` the patches.
4. Only ``compat`` assigns to attributes of names imported from vLLM.

Prints each offending ``file:line`` and exits with 1 if there is one.
"""

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGE = "vllm_relay"
# Lowest first; "" is the package's own __init__.
LAYERS = (
    ("config", "lifetime", "validation", "patching", "plan", "ops", "sharing"),
    ("metrics",),
    ("compat",),
    ("backend", "system_kv", "explain", "serving", "calibration", "monitoring"),
    ("plugin",),
    ("",),
    ("cli",),
)
MAY_IMPORT_VLLM = ("compat", "plugin", "backend", "system_kv", "calibration", "cli")
MAY_IMPORT_COMPAT = ("", "plugin", "backend", "system_kv", "calibration")
# Module -> prefixes that it may not import, with the reason.
FORBIDDEN = {
    "system_kv.file": {"vllm": "files can be read without vLLM"},
    "sharing": {
        "torch": "sharing is plain Python and NumPy",
        f"{PACKAGE}.ops": "sharing does not know the kernels",
    },
}


def within(module: str, prefix: str) -> bool:
    """True if `module` is `prefix` or lies in it."""
    return module == prefix or module.startswith(prefix + ".")


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under ``if TYPE_CHECKING:``."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for other in node.orelse:
                yield other
                yield from _nodes(other)
        else:
            yield from _nodes(node)


def imported(tree: ast.Module, package: str) -> Iterator[tuple[int, str, str, str]]:
    """Each import of `tree`, a module of `package`: line, module, name in it, name bound here."""
    for node in _nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, "", alias.asname or alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:
                yield node.lineno, base, alias.name, alias.asname or alias.name


def assigned(tree: ast.Module, names: set[str]) -> Iterator[tuple[int, str]]:
    """Line and text of each assignment to, or deletion of, an attribute of one of the names."""
    for node in _nodes(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            targets = [ast.Attribute(node.args[0], "…")]
        flat = [
            x for t in targets for x in (t.elts if isinstance(t, ast.Tuple | ast.List) else [t])
        ]
        for target in flat:
            root: ast.expr = target
            while isinstance(root, ast.Attribute | ast.Subscript):
                root = root.value
            if root is not target and isinstance(root, ast.Name) and root.id in names:
                yield node.lineno, ast.unparse(target)


def objection(module: str, target: str) -> str | None:
    """The reason why `module` (inside the package) may not import `target` (absolute), or None."""
    room = module.split(".")[0]
    if within(target, "vllm") and room not in MAY_IMPORT_VLLM:
        return "must work without vLLM"
    if within(target, f"{PACKAGE}.compat") and room not in MAY_IMPORT_COMPAT:
        return "patches are for " + ", ".join(filter(None, MAY_IMPORT_COMPAT))
    for name, rules in FORBIDDEN.items():
        for prefix, reason in rules.items():
            if within(module, name) and within(target, prefix):
                return reason
    if within(target, PACKAGE):
        layer = {name: i for i, names in enumerate(LAYERS) for name in names}
        other = target.split(".")[1] if "." in target else ""
        for name in (room, other):
            if name not in layer:
                return f"{name} has no layer in tools/check_imports.py"
        # Anyone may read the package's version.
        if other and layer[other] > layer[room]:
            return f"{room} lies below {other}"
    return None


def cycle(graph: Mapping[str, set[str]]) -> list[str] | None:
    """One cycle of a graph, its first node repeated at the end; or None."""
    path: list[str] = []
    done: set[str] = set()

    def visit(node: str) -> list[str] | None:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return None
        path.append(node)
        for other in sorted(graph.get(node, ())):
            if found := visit(other):
                return found
        done.add(path.pop())
        return None

    return next(filter(None, map(visit, sorted(graph))), None)


def check(root: Path) -> list[str]:
    """The offences below `root`/vllm_relay, one line of text each."""
    trees = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        trees[name] = path, ".".join(parts[:-1]), ast.parse(path.read_text(), str(path))
    found, graph = [], {}
    for module, (path, package, tree) in trees.items():
        where, inside = path.relative_to(root), module.removeprefix(PACKAGE).removeprefix(".")
        graph[module] = edges = set[str]()
        from_vllm = set()
        for line, base, name, bound in imported(tree, package):
            submodule = f"{base}.{name}"
            target = submodule if submodule in trees else base
            if target in trees:
                edges.add(target)
            if within(base, "vllm"):
                from_vllm.add(bound)
            if reason := objection(inside, target):
                found.append(f"{where}:{line}: imports {target}: {reason}")
        if inside != "compat":
            for line, text in assigned(tree, from_vllm):
                found.append(f"{where}:{line}: assigns to {text}: patches belong in compat")
    if circle := cycle(graph):
        found.append("imports go round: " + " -> ".join(circle))
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
