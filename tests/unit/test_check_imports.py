"""tools/check_imports.py: the package keeps each rule, and a planted violation of each is found."""

from pathlib import Path

import pytest

from tools.check_imports import check

ROOT = Path(__file__).parents[2]


def tree(folder: Path, **modules: str) -> Path:
    """A package with these modules (``a__b`` is a/b.py); the rest of each package is empty."""
    for name, text in modules.items():
        path = folder / "vllm_relay" / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for parent in path.relative_to(folder).parents[:-1]:
            (folder / parent / "__init__.py").touch()
    return folder


def test_the_package_keeps_the_rules() -> None:
    assert check(ROOT) == []


def test_allowed_imports_are_not_reported(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        compat="from vllm.a import B\nB.method = 1\nsetattr(B, 'x', 2)\n",
        backend__cpu="from vllm.a import B\nfrom vllm_relay import compat\nclass C(B): pass\n"
        "def f(self):\n    C.x = self.y = B.x\n    B = 1\n",
        backend__impl="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
        "    from vllm_relay.backend.cpu import C\n    from vllm.a import B\n",
    )
    assert check(root) == []


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        (
            {
                "ops__a": "from vllm_relay.ops import b",
                "ops__b": "def f():\n    from vllm_relay.ops.c import x",
                "ops__c": "from . import a",
            },
            "imports go round: vllm_relay.ops.a -> vllm_relay.ops.b -> vllm_relay.ops.c -> "
            "vllm_relay.ops.a",
        ),
        (
            {"sharing__a": "import vllm_relay.sharing.b", "sharing__b": "from .a import x"},
            "imports go round: vllm_relay.sharing.a -> vllm_relay.sharing.b -> "
            "vllm_relay.sharing.a",
        ),
        (
            {"ops__a": "import math\nfrom vllm_relay.backend import cpu", "backend__cpu": ""},
            "vllm_relay/ops/a.py:2: imports vllm_relay.backend.cpu: ops lies below backend",
        ),
        (
            {"backend__a": "def f():\n    from vllm_relay import plugin", "plugin": ""},
            "vllm_relay/backend/a.py:2: imports vllm_relay.plugin: backend lies below plugin",
        ),
        ({"room__a": "from vllm_relay import config", "config": ""}, "room has no layer"),
        (
            {"ops__a": "def f():\n    from vllm.platforms import current_platform"},
            "vllm_relay/ops/a.py:2: imports vllm.platforms: must work without vLLM",
        ),
        ({"metrics": "import vllm"}, "metrics.py:1: imports vllm: must work without vLLM"),
        ({"system_kv__file": "import vllm"}, "files can be read without vLLM"),
        ({"sharing__a": "import torch"}, "sharing is plain Python and NumPy"),
        ({"explain__a": "from vllm_relay import compat", "compat": ""}, "patches are for plugin"),
        (
            {"backend__a": "from vllm.a import B\nB.method = 1"},
            "vllm_relay/backend/a.py:2: assigns to B.method: patches belong in compat",
        ),
        ({"system_kv__a": "from vllm import a as b\nb.C.x = 1"}, "a.py:2: assigns to b.C.x"),
        ({"plugin": "import vllm.a\nvllm.a.b += 1"}, "plugin.py:2: assigns to vllm.a.b"),
        ({"backend__a": "from vllm.a import B\nsetattr(B, 'x', 1)"}, "a.py:2: assigns to B"),
        (
            {"backend__a": "def f(x):\n    from vllm.a import B\n    x, B._table['y'] = 1, 2"},
            "a.py:3: assigns to B._table['y']",
        ),
        ({"backend__a": "from vllm.a import B\ndel B.x"}, "a.py:2: assigns to B.x"),
    ],
)
def test_a_planted_violation_is_found(
    tmp_path: Path, modules: dict[str, str], expected: str
) -> None:
    (found,) = check(tree(tmp_path, **modules))
    assert expected in found
