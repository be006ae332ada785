"""The plugin in processes of its own: registration, pickling, versions, moved targets."""

import re
import subprocess
import sys
import textwrap

import pytest

from tests.engine.engine import ROOT, SMOLLM2, environment
from vllm_relay import compat
from vllm_relay.compat import SUPPORTED, unsupported
from vllm_relay.patching import TargetMoved, target, wrap

LOW, HIGH = (".".join(map(str, version)) for version in SUPPORTED)


def _python(code: str, *, with_log: bool = False) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment(VLLM_LOGGING_LEVEL="INFO"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + (done.stderr if with_log else "")


@pytest.mark.parametrize("version", ["0.26.0", "0.27.1+cpu", "0.32.0", "0.33.1rc1"])
def test_supported_engines_are_accepted(version: str) -> None:
    assert unsupported(version) is None


@pytest.mark.parametrize("version", ["0.25.9", f"{HIGH}.0", "1.0.0+cpu", "dev", "0.x"])
def test_other_engines_are_refused_with_the_range(version: str) -> None:
    expected = f"it supports vLLM >= {LOW}, < {HIGH}; found {version}"
    assert unsupported(version) == expected


def test_the_package_metadata_has_the_same_range() -> None:
    assert f'cuda = ["vllm>={LOW},<{HIGH}"]' in (ROOT / "pyproject.toml").read_text()


def test_each_patch_says_why_and_when_to_remove_it() -> None:
    """A function of compat that wraps, adds or replaces something says so, and why."""
    patches = [f for f in vars(compat).values() if "Upstream: " in (getattr(f, "__doc__", 0) or "")]
    assert len(patches) == 11
    for patch in patches:
        assert "Why: " in patch.__doc__ and "Remove when: " in patch.__doc__, patch.__name__


def test_a_target_that_has_moved_is_named() -> None:
    class Pool:
        def reset(self) -> str:
            return "stock"

    for path in ("vllm_relay.nowhere:Pool", "vllm_relay.config:Nothing"):
        with pytest.raises(TargetMoved, match=path.replace(":", r"\.")):
            target(path)
    for owner in (Pool, Pool()):
        with pytest.raises(TargetMoved, match=r"has no Pool\.clear"):
            wrap(owner, "clear")


def test_a_method_is_wrapped_once() -> None:
    class Pool:
        def reset(self, count: int) -> str:
            return f"{count}"

        @classmethod
        def make(cls) -> "Pool":
            return cls()

    one, other = Pool(), Pool()
    for owner in (one, one, Pool, Pool):
        wrap(owner, "reset")(lambda stock, *args, **kwargs: f"<{stock(*args, **kwargs)}>")
    assert (one.reset(count=1), other.reset(2)) == ("<1>", "<2>")
    wrap(Pool, "make")(lambda stock, cls: (cls, stock(cls)))
    assert Pool.make()[0] is Pool  # type: ignore[index]


def test_importing_the_package_loads_neither_torch_nor_vllm() -> None:
    out = _python("import sys, vllm_relay; print({'torch', 'vllm', 'numpy'} & set(sys.modules))")
    assert out.strip() == "set()"


def test_register_is_idempotent_and_keeps_one_member() -> None:
    out = _python(
        """
        import vllm_relay
        vllm_relay.register()
        from vllm.platforms.cpu import CpuPlatform
        from vllm.v1.attention.backends.registry import AttentionBackendEnum as E
        member, wrapped = E["RELAY"], CpuPlatform.get_attn_backend_cls.__func__
        vllm_relay.register()
        assert E["RELAY"] is member and list(E).count(member) == 1
        assert CpuPlatform.get_attn_backend_cls.__func__ is wrapped
        print(member.get_class().__name__, member.get_class().get_name())
        """
    )
    assert out.split()[-2:] == ["RelayBackend", "RELAY"]


def test_a_config_can_be_unpickled_where_nothing_is_registered_yet() -> None:
    out = _python(
        """
        import copy, os, pickle, subprocess, sys
        import vllm_relay
        vllm_relay.register()
        from vllm.config import AttentionConfig
        from vllm.v1.attention.backends.registry import AttentionBackendEnum as E
        config = AttentionConfig(backend="Relay")
        assert copy.deepcopy(config).backend is E["RELAY"]
        assert pickle.loads(pickle.dumps(E["CPU_ATTN"])) is E["CPU_ATTN"]
        code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).backend.name)"
        os.environ["VLLM_PLUGINS"] = ""  # the child knows the plugin from the pickle alone
        done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(config), stdout=-1)
        print(done.stdout.decode())
        """
    )
    assert out.split()[-1] == "RELAY"


def test_the_name_is_known_before_any_engine_is_made() -> None:
    out = _python(
        """
        from vllm.config import AttentionConfig
        print(AttentionConfig(backend="Relay").backend.name)
        """
    )
    assert out.split()[-1] == "RELAY"


def test_whoever_selects_the_backend_gets_its_metrics_and_nobody_else() -> None:
    out = _python(
        f"""
        import os
        from vllm.config import AttentionConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm_relay.monitoring.channel import KEY

        for given in (
            {{}},
            {{"attention_backend": "relay"}},
            {{"attention_config": {{"backend": "relay"}}}},
            {{"attention_config": AttentionConfig(backend="relay")}},
        ):
            os.environ.pop(KEY, None)
            EngineArgs("{SMOLLM2}", enforce_eager=True, **given).create_engine_config()
            print(KEY in os.environ)
        """
    )
    assert re.findall("^(?:True|False)$", out, re.M) == ["False", "True", "True", "True"]


def test_where_relay_is_unavailable_vllm_is_left_as_it_is_and_one_line_says_why() -> None:
    code = """
        import os, re, sys
        os.environ["VLLM_PLUGINS"] = ""  # each case registers for itself, in a fork
        import vllm.platforms.cpu as cpu, vllm.version
        from vllm.config import AttentionConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.ompmultiprocessing import OMPProcessManager
        from vllm.v1.attention.backends.registry import AttentionBackendEnum
        from vllm.v1.worker.worker_base import WorkerBase
        import vllm_relay
        from vllm_relay import metrics

        def case(name, change):
            if os.fork():
                return os.wait()
            change()
            metrics.logger.log = lambda level, *line: print(name, "logged:", line[0] % line[1:])
            vllm_relay.register_name(), vllm_relay.register(), vllm_relay.register()
            owners = EngineArgs, cpu.CpuPlatform, OMPProcessManager, WorkerBase
            methods = [method for owner in owners for method in vars(owner).values()]
            methods = [getattr(method, "__func__", method) for method in methods]
            wrapped = sum(hasattr(method, "_vllm_relay") for method in methods)
            print(name, "wrapped", wrapped, "known", "RELAY" in AttentionBackendEnum.__members__)
            try:
                AttentionConfig(backend="relay")
            except ValueError as error:
                print(name, "asked:", re.search("Unknown.*?'RELAY'", str(error))[0])
            sys.stdout.flush(), os._exit(0)

        def set_version(version):
            vllm.version.__version__ = version

        case("as it is", lambda: None)
        case("before", lambda: set_version("0.25.9"))
        case("after", lambda: set_version("0.34.0"))
        case("gone", lambda: delattr(EngineArgs, "from_cli_args"))
        stock = classmethod(lambda cls, chosen: "stock")
        case("moved", lambda: setattr(cpu.CpuPlatform, "get_attn_backend_cls", stock))
        """
    lines = _python(code).splitlines()
    unavailable = {
        "before": f"it supports vLLM >= {LOW}, < {HIGH}; found 0.25.9",
        "after": f"it supports vLLM >= {LOW}, < {HIGH}; found 0.34.0",
        "gone": "this vLLM has no EngineArgs.from_cli_args",
        "moved": "this vLLM's CpuPlatform.get_attn_backend_cls takes ['cls', 'chosen'], not "
        "['cls', 'selected_backend', 'attn_selector_config']",
    }
    expected = ["as it is wrapped 5 known True"]
    for name, reason in unavailable.items():
        expected.append(f"{name} logged: relay: unavailable: {reason}")
        expected.append(f"{name} wrapped 0 known False")
        expected.append(f"{name} asked: Unknown attention backend: 'RELAY'")
    assert [line for line in lines if line.startswith(("as it is", *unavailable))] == expected


def test_layers_without_a_relay_class_get_vllms_own_and_a_reason() -> None:
    out = _python(
        """
        from types import SimpleNamespace
        import vllm_relay
        vllm_relay.register()
        from vllm.platforms.cpu import CpuPlatform
        from vllm.v1.attention.backends.registry import AttentionBackendEnum as E
        plain = SimpleNamespace(use_mla=False, use_sparse=False)
        named = {"selected_backend": E["RELAY"], "attn_selector_config": plain}  # as vLLM calls it
        print(CpuPlatform.get_attn_backend_cls(**named))
        print(CpuPlatform.get_attn_backend_cls(E["FLASH_ATTN"], plain))
        mla = SimpleNamespace(use_mla=True, use_sparse=False)
        try:
            print(CpuPlatform.get_attn_backend_cls(E["RELAY"], mla))
        except NotImplementedError as error:  # 0.27 has no MLA on the CPU
            print(error)
        """,
        with_log=True,
    )
    assert "vllm_relay.backend.RelayBackend" in out
    assert "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend" in out
    assert "MLA" in out
    assert "relay: not used: multi-head latent attention has no relay path" in out


def test_no_core_is_set_aside_for_our_connectors() -> None:
    code = """
        from types import SimpleNamespace

        from vllm.utils.ompmultiprocessing import OMPProcessManager
        from vllm_relay import register

        def reserved(connector):
            parallel = SimpleNamespace(
                local_world_size=1, data_parallel_rank_local=0, _api_process_count=1
            )
            transfer = None if connector is None else SimpleNamespace(kv_connector=connector)
            config = SimpleNamespace(parallel_config=parallel, kv_transfer_config=transfer)
            count = OMPProcessManager(config).reserve_cpu_num
            assert config.kv_transfer_config is transfer  # the engine's own is left as it is
            return count

        assert reserved("SystemKVConnector") == reserved(None) + 1  # vLLM's way
        register()
        assert reserved("SystemKVConnector") == reserved("CaptureConnector") == reserved(None)
        assert reserved("NixlConnector") == reserved(None) + 1
        """
    _python(code)


def test_on_cuda_a_model_that_relay_cannot_serve_gets_what_vllm_chooses() -> None:
    code = """
        import sys
        from types import ModuleType

        import torch
        import vllm_relay
        vllm_relay.register()
        # The compiled half of the CUDA build; the platform's class itself is vLLM's.
        sys.modules["vllm._C_stable_libtorch"] = ModuleType("kernels")
        sys.modules.setdefault("vllm._C", ModuleType("kernels"))
        from vllm.platforms.cuda import CudaPlatformBase as Platform
        from vllm.platforms.interface import DeviceCapability
        from vllm.v1.attention.backends.registry import AttentionBackendEnum as E
        from vllm.v1.attention.selector import AttentionSelectorConfig
        from vllm_relay import backend, compat
        from vllm_relay.backend import cuda

        backend.RelayBackend = cuda.RelayBackend  # as on a machine with a GPU
        Platform.get_device_capability = classmethod(lambda cls, device=0: DeviceCapability(9, 0))
        compat.fall_back_on_cuda()
        compat.fall_back_on_cuda()
        layer = dict(head_size=64, kv_cache_dtype="auto", block_size=16)
        for dtype in (torch.bfloat16, torch.float32):
            config = AttentionSelectorConfig(dtype=dtype, **layer)
            print(dtype, Platform.get_attn_backend_cls(E["RELAY"], config))
        """
    out = _python(code, with_log=True)
    assert "torch.bfloat16 vllm_relay.backend.cuda.RelayBackend" in out
    assert "torch.float32 vllm.v1.attention.backends.triton_attn" in out
    assert out.count("relay: not used: Selected backend") == 1 and "dtype not supported" in out
