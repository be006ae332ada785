"""The patches of `patches/` apply strictly to this vLLM, close their gap and leave the rest alone.

A copy of the installed package (symlinks, but for the patched files) stands first on the module
search path of child processes.
"""

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent
MODEL = ROOT / ".models" / "SmolLM2-135M-Instruct"
CPU_PATCH = ROOT / "patches" / "0001-cpu-platform-honour-registered-backend.patch"
PICKLE_PATCH = ROOT / "patches" / "0002-registry-registered-backends-survive-pickling.patch"
ENGINE = version("vllm")

_spec = importlib.util.find_spec("vllm")
if _spec is None or _spec.origin is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)
INSTALLED = Path(_spec.origin).parent
HAS_STRING_REGISTRATION = (
    "def register(" in (INSTALLED / "v1/attention/backends/registry.py").read_text()
)
PATCHES = [CPU_PATCH, PICKLE_PATCH] if HAS_STRING_REGISTRATION else [CPU_PATCH]
STOCK = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
TINY = "tiny_backend.TinyBackend"

string_registration = pytest.mark.skipif(
    not HAS_STRING_REGISTRATION,
    reason=f"vLLM {ENGINE} registers no backends by name: nothing for patch 0002 to change",
)


def _targets(patch: Path) -> list[str]:
    """The files a patch changes, relative to the directory that holds the package."""
    return [
        line[6:].split("\t")[0]
        for line in patch.read_text().splitlines()
        if line.startswith("+++ b/")
    ]


def _apply(patch: Path, tree: Path, *flags: str) -> None:
    """Apply with no fuzz; a target that has moved fails the test with what `patch` said."""
    if shutil.which("patch"):
        command = ["patch", "-p1", "--fuzz=0", "--batch", "--forward", *flags, "-i", str(patch)]
    else:
        command = [
            "git",
            "apply",
            *("--check" for flag in flags if flag == "--dry-run"),
            str(patch),
        ]
    # Without a ceiling git would take the tree for a part of a repository around it.
    env = os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.parent)}
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    if done.returncode:
        pytest.fail(
            f"{patch.name} does not apply to vLLM {ENGINE}: the code it changes has moved. "
            f"Redo it against {', '.join(_targets(patch))}, or drop it if upstream closed the gap "
            f"(patches/README.md).\n{done.stdout}{done.stderr}",
            pytrace=False,
        )


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an importable, patched `vllm`."""
    tree = tmp_path_factory.mktemp("patched")
    changed = {target for patch in PATCHES for target in _targets(patch)}
    for folder, _, files in os.walk(INSTALLED):
        inside = tree / "vllm" / Path(folder).relative_to(INSTALLED)
        inside.mkdir()
        for name in files:
            link = inside / name
            if str(link.relative_to(tree)) in changed:
                shutil.copyfile(Path(folder) / name, link)
            else:
                link.symlink_to(Path(folder) / name)
    for patch in PATCHES:
        _apply(patch, tree, "--dry-run")
        _apply(patch, tree)
    return tree


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two vLLM plugins: ours, and `plain`, which registers and patches nothing."""
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "plain_plugin.py").write_text(
        "def register():\n"
        "    from vllm.v1.attention.backends.registry import register_backend\n"
        "    from vllm.v1.worker.worker_base import WorkerBase\n"
        "    from vllm_relay import compat, metrics\n"
        "    register_backend(compat.BACKEND_NAME, compat.BACKEND_PATH)\n"
        "    WorkerBase.relay_counters = lambda self: metrics.counters()\n"
    )
    info = folder / "relay_patch_test-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: relay-patch-test\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\n"
        "relay_under_test = vllm_relay:register\n"
        "plain = plain_plugin:register\n"
    )
    return folder


def _run(
    out: Path, command: str, *arguments: object, path: tuple[Path, ...] = (), **env: str
) -> Any:
    """Run `in_engine.py` with `path` first on the module search path; return its answer and log."""
    search = os.pathsep.join(str(entry) for entry in (*path, ROOT))
    # No model hub, no usage report, and no plugin but those a test asks for.
    quiet = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "in_engine.py"), command, str(out), *map(str, arguments)],
        env=os.environ | quiet | {"PYTHONPATH": search} | env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    log = done.stdout + done.stderr
    if done.returncode:
        # The cause stands in a worker's log, far above the front end's traceback.
        causes = [line for line in log.splitlines() if "Error" in line]
        pytest.fail("\n".join([f"{command} failed:", *causes, log[-4000:]]), pytrace=False)
    answer = json.loads(out.read_text()) | {"log": log}
    expected = next((entry / "vllm" for entry in path if (entry / "vllm").is_dir()), INSTALLED)
    assert Path(answer["vllm"]) == expected / "__init__.py", (
        "the child met another vLLM than the one under test"
    )
    return answer


def test_patches_carry_a_mail_header() -> None:
    for patch in (CPU_PATCH, PICKLE_PATCH):
        head = patch.read_text().splitlines()[:4]
        assert [line.split(" ")[0] for line in head] == ["From", "From:", "Date:", "Subject:"], (
            patch.name
        )


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name[:4])
def test_a_moved_target_fails_loudly(patch: Path, tmp_path: Path) -> None:
    for target in _targets(patch):
        moved = (INSTALLED.parent / target).read_text().replace("logger.info(", "logger.debug(")
        (tmp_path / target).parent.mkdir(parents=True)
        (tmp_path / target).write_text(moved)
    with pytest.raises(pytest.fail.Exception, match=r"does not apply to vLLM .*has moved"):
        _apply(patch, tmp_path, "--dry-run")


@pytest.fixture(scope="module")
def exchange(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Any, Any]]:
    """Pickle in one process, unpickle in another: both answers, by what stands on the path."""

    @functools.cache
    def run(*path: Path) -> tuple[Any, Any]:
        folder = tmp_path_factory.mktemp("exchange")
        pickles = folder / "members"
        sent = _run(folder / "sent.json", "send", pickles, path=path)
        return sent, _run(folder / "got.json", "receive", pickles, path=path)

    return run


@string_registration
def test_registered_members_survive_pickling(
    patched: Path, exchange: Callable[..., tuple[Any, Any]]
) -> None:
    sent, got = exchange(patched)
    for promise in ("copies_are_identical", "nested_copies_are_identical", "loads_here"):
        assert sent[promise], promise
    assert not {"PLAIN", "SAME_PATH", "BARE", "DECORATED"} & {
        name for names in got["before"] for name in names
    }
    assert got["found"] == [
        [enum, name, where, overridden, True]
        for enum in ("AttentionBackendEnum", "MambaAttentionBackendEnum")
        for name, where, overridden in (
            ("PLAIN", "pkg.one.Backend", True),
            ("SAME_PATH", "pkg.one.Backend", True),
            ("BARE", "pkg.two.Backend", False),
            ("DECORATED", "pathlib.Path", True),
        )
    ]
    accepted, refused = got["again"]
    assert accepted == "accepted"
    assert "PLAIN already exists" in refused


@string_registration
def test_without_the_patch_they_do_not(exchange: Callable[..., tuple[Any, Any]]) -> None:
    found = exchange()[1]["found"]
    by_name = "AttributeError: PLAIN"  # how early releases of Python 3.11 pickle enum members
    if found[0] == by_name:
        assert found[3] == "AttributeError: DECORATED"
        return
    assert "'pkg.one.Backend' is not a valid AttentionBackendEnum" in found[0]
    # A member from the decorator has the value of TORCH_SDPA, "", and arrives as that.
    assert found[3][1] == "TORCH_SDPA"


@string_registration
def test_what_is_pickled_and_hashed_today_stays(
    patched: Path, exchange: Callable[..., tuple[Any, Any]]
) -> None:
    ours, stock = exchange(patched)[0], exchange()[0]
    assert ours["config_hash"] == stock["config_hash"], "the patch must not touch the compile cache"
    assert ours["builtin_pickle"] == stock["builtin_pickle"], "vLLM's own members pickle as before"


def test_cpu_platform_returns_out_of_tree_backends(patched: Path, tmp_path: Path) -> None:
    ours = _run(tmp_path / "ours.json", "platform", path=(patched,))
    for unchanged in ("None", "CPU_ATTN", "FLASH_ATTN", "TORCH_SDPA", "CUSTOM"):
        assert ours[unchanged] == STOCK, unchanged
    honoured = {"CUSTOM overridden", "FLASH_ATTN overridden"}
    if HAS_STRING_REGISTRATION:
        honoured |= {"registered", "registered, no override"}
    assert {case: ours[case] for case in honoured} == dict.fromkeys(honoured, TINY)
    assert ours["picky"].startswith(
        "ValueError: Selected backend AttentionBackendEnum.CUSTOM is not valid"
    )
    assert "head_size not supported" in ours["picky"]
    assert "ModuleNotFoundError" in ours["missing"]

    stock = _run(tmp_path / "stock.json", "platform")
    assert {stock[case] for case in honoured} == {STOCK}, (
        "the gap that patch 0001 closes is not there"
    )
    assert stock["picky"] == stock["missing"] == STOCK
    if (
        HAS_STRING_REGISTRATION
    ):  # MLA and sparse attention are decided first; vLLM 0.27 asks in another order
        assert (ours["sparse"], ours["mla"]) == (stock["sparse"], stock["mla"])


@pytest.fixture(scope="module")
def unpatched_texts(plugins: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return _generate(tmp_path_factory.mktemp("unpatched"), "relay_under_test", plugins)


def _generate(tmp_path: Path, plugin: str, *path: Path) -> list[str]:
    """Greedy texts from an engine process that is spawned: its config travels as a pickle."""
    if not MODEL.is_dir():
        pytest.skip(f"no model at {MODEL.relative_to(ROOT)}: run tools/make_model.py")
    spawn = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_PLUGINS": plugin}
    answer = _run(tmp_path / "texts.json", "generate", MODEL, path=path, **spawn)
    assert answer["counters"]["steps"] > 0, (
        f"the relay backend did not run:\n{answer['log'][-4000:]}"
    )
    return list(answer["texts"])


@string_registration
@pytest.mark.engine
@pytest.mark.parametrize("plugin", ["relay_under_test", "plain"])
def test_engine_on_the_patched_copy(
    plugin: str, patched: Path, plugins: Path, unpatched_texts: list[str], tmp_path: Path
) -> None:
    """Ours as it is; and `plain`: with both patches, the workarounds of ours are not needed."""
    assert _generate(tmp_path, plugin, patched, plugins) == unpatched_texts
