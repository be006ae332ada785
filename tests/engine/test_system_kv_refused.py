"""A file that does not fit stops the start with one line that says what differs."""

import json
import random
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from benchmarks.harness.environment import OFFLINE
from tests.engine.engine import APART, SMOLLM2, environment
from tests.engine.system_kv import run_program, run_relay
from vllm_relay import register
from vllm_relay.serving.processes import beside_python, serving
from vllm_relay.system_kv import identity
from vllm_relay.system_kv.admission import ADMITTED
from vllm_relay.system_kv.file import MANIFEST_KEY, SystemKVError, SystemKVFile

pytestmark = [pytest.mark.engine, pytest.mark.slow]

MESSAGE = "You are the assistant of a small bakery. Answer kindly and in one sentence. " * 20
SMALL = ["--enforce-eager", "--max-model-len", "2048"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    register()
    return tmp_path_factory.mktemp("refused")


@pytest.fixture(scope="module")
def good(folder: Path) -> Path:
    """A file that fits SmolLM2; tests work on copies."""
    (folder / "bakery.txt").write_text(MESSAGE)
    output = folder / "bakery.relay"
    source = ("--system-prompt", folder / "bakery.txt")
    text = run_relay("build", "--model", SMOLLM2, *source, "-o", output, *SMALL, **APART)
    assert re.search(r"bakery.relay: \d+ tokens, \d+\.\d MB", text)
    assert re.search(r"\d+ tokens in 1 step, \d+\.\d s, [\d,]+ tokens/s", text)
    return output


def _start(*files: Path, model: Path = SMOLLM2, **changes: Any) -> list[Any]:
    """What vLLM does with these arguments before it starts an engine; the files it will load."""
    settings = {"system_kv": {"files": [str(f) for f in files], **changes.pop("system_kv", {})}}
    arguments: dict[str, Any] = {
        "model": str(model),
        "attention_backend": "relay",
        "max_model_len": 2048,
        "enforce_eager": True,
        "additional_config": {"relay": settings},
    }
    config = EngineArgs(**{**arguments, **changes}).create_engine_config()
    return list(config.kv_transfer_config.kv_connector_extra_config[ADMITTED])


def _refusal(*files: Path, **more: Any) -> str:
    with pytest.raises(SystemKVError) as caught:
        _start(*files, **more)
    message = str(caught.value)
    assert "\n" not in message
    # the other policy: the engine starts, without that prompt
    assert _start(*files, **{**more, "system_kv": {"errors": "skip"}}) == []
    return message


def test_a_file_that_fits_is_admitted(good: Path) -> None:
    assert _start(good) == [[str(good), SystemKVFile(good).seal, None]]


def test_a_salt_reaches_the_engine_and_a_bad_file_of_salts_stops_the_start(
    good: Path, tmp_path: Path
) -> None:
    path = tmp_path / "salts.json"
    settings = {"system_kv": {"salts": str(path)}}
    for content, said in (
        (None, f"system_kv.salts {path}: No such file or directory"),
        ("{", f"system_kv.salts {path}: is not JSON: "),
        ('["geheim"]', f"system_kv.salts {path}: must be an object of texts"),
        ('"geheim"', f"system_kv.salts {path}: must be an object of texts"),
        (json.dumps({str(good): ["geheim"]}), f"system_kv.salts {path}: must be an object of te"),
        (json.dumps({str(good): ""}), f"system_kv.salts {path}: must be an object of texts"),
        (
            '{"a.relay": "a"}',
            f"system_kv.salts {path}: a.relay is not one of system_kv.files",
        ),
    ):
        if content is not None:
            path.write_text(content)
        with pytest.raises(SystemKVError) as caught:
            _start(good, **settings)
        assert str(caught.value).startswith(said) and "\n" not in str(caught.value)
        assert "geheim" not in str(caught.value)
    path.write_text(json.dumps({str(good): "tenant-7"}))
    admitted = _start(good, **settings)
    assert admitted == [[str(good), SystemKVFile(good).seal, "tenant-7"]]
    assert "tenant-7" not in repr(admitted)


def test_another_version_of_the_engine(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = SystemKVFile(good).manifest.engine["vllm"]
    ours = {"vllm": "0.99.1"}
    version = identity.version
    monkeypatch.setattr(identity, "version", lambda name: ours.get(name) or version(name))
    assert _refusal(good).endswith(
        f"differs from this engine in vLLM's version (file {theirs}, engine 0.99.1; "
        "allowed by system_kv.other_engines)"
    )
    assert len(_start(good, system_kv={"other_engines": True})) == 1
    ours["vllm"] = ".".join([*theirs.split(".")[:2], "99"])
    assert len(_start(good)) == 1


def _copy_of_model(folder: Path, name: str) -> Path:
    """SmolLM2 under the same name, in another folder."""
    return Path(shutil.copytree(SMOLLM2, folder / name / SMOLLM2.name))


def _other_weights(model: Path) -> None:
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(-1000, 2)
        byte = file.read(1)[0]
        file.seek(-1000, 2)
        file.write(bytes([byte ^ 1]))


def _other_tokenizer(model: Path) -> None:
    path = model / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(tokenizer))


def _other_template(model: Path) -> None:
    path = model / "chat_template.jinja"
    path.write_text(path.read_text().replace("<|im_start|>", "<|im_start|> "))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_other_weights, "the model's weights (file "),
        (_other_tokenizer, "the tokenizer (file "),
        (_other_template, "the chat template (file "),
    ],
    ids=["weights", "tokenizer", "chat-template"],
)
def test_another_model_under_the_same_name(
    change: Callable[[Path], None], said: str, good: Path, tmp_path: Path
) -> None:
    model = _copy_of_model(tmp_path, "copy")
    assert _start(good, model=model)
    change(model)
    message = _refusal(good, model=model)
    assert message.startswith(f"{good}: differs from this engine in {said}")
    assert message.count("(file ") == 1  # nothing else differs


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8192}
OTHER_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"dtype": "float32"}, "dtype (file bfloat16, engine float32)"),
    "kv-cache-dtype": ({"kv_cache_dtype": "fp8"}, "KV cache dtype (file auto, engine fp8"),
    "rope-theta": (
        {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}},
        "RoPE rope_theta (file 100000.0, engine 500000.0)",
    ),
    "rope-scaling": (
        {"hf_overrides": {"rope_parameters": {**YARN, "rope_theta": 1e5}}},
        "RoPE factor (file None, engine 2.0)",
    ),
    "config": ({"hf_overrides": {"rms_norm_eps": 1e-3}}, "the model's rms_norm_eps (file 9.99"),
}


@pytest.mark.parametrize("name", OTHER_SETTINGS)
def test_other_settings_of_the_engine(name: str, good: Path) -> None:
    changes, said = OTHER_SETTINGS[name]
    assert said in _refusal(good, **changes)


def test_another_chat_template_on_the_command_line(good: Path, tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    own = (SMOLLM2 / "chat_template.jinja").read_text()

    def start(text: str) -> list[Any]:
        template.write_text(text)
        parser = FlexibleArgumentParser()
        parser.add_argument("--chat-template")
        parser = AsyncEngineArgs.add_cli_args(parser)
        flags = ["--model", str(SMOLLM2), "--attention-backend", "relay", *SMALL]
        flags += ["--chat-template", str(template)]
        flags += ["--additional-config.relay.system_kv", str(good)]
        args = AsyncEngineArgs.from_cli_args(parser.parse_args(flags))
        extra = args.create_engine_config().kv_transfer_config.kv_connector_extra_config
        return list(extra[ADMITTED])

    assert start(own)
    with pytest.raises(SystemKVError, match="differs from this engine in the chat template"):
        start(own.replace("system", "System"))


def _edited(good: Path, folder: Path) -> Path:
    """The manifest edited by hand: one token id is another, everything else as it was."""
    raw = good.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    manifest = json.loads(header["__metadata__"][MANIFEST_KEY])
    manifest["token_ids"][5] += 1
    header["__metadata__"][MANIFEST_KEY] = json.dumps(manifest, sort_keys=True)
    edited = json.dumps(header).encode()
    path = folder / "edited.relay"
    path.write_bytes(len(edited).to_bytes(8, "little") + edited + raw[8 + length :])
    return path


def _future(good: Path, folder: Path) -> Path:
    raw = good.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + length].replace(rb"\"format\": 2", rb"\"format\": 3")
    assert header != raw[8 : 8 + length]
    path = folder / "future.relay"
    path.write_bytes(raw[:8] + header + raw[8 + length :])
    return path


def _truncated(good: Path, folder: Path) -> Path:
    path = folder / "truncated.relay"
    path.write_bytes(good.read_bytes()[:-1])
    return path


def _flipped(good: Path, folder: Path) -> Path:
    raw = bytearray(good.read_bytes())
    raw[len(raw) // 2] ^= 1
    path = folder / "flipped.relay"
    path.write_bytes(raw)
    return path


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (_edited, "the manifest is not the one that was written with it"),
        (_future, "has format 3; this version of vllm-relay reads 1 and 2: install a newer one"),
        (_truncated, "is truncated"),
        (_flipped, "is damaged: checksum differs"),
        (lambda good, folder: folder, "is a directory"),
        (lambda good, folder: folder / "missing.relay", "No such file"),
    ],
    ids=["edited", "future", "truncated", "flipped", "directory", "missing"],
)
def test_damaged_files(
    make: Callable[[Path, Path], Path], said: str, good: Path, tmp_path: Path
) -> None:
    path = make(good, tmp_path)
    message = _refusal(path)
    assert message.startswith(f"{path}: ") and said in message
    # a good one beside it is loaded when errors are skipped
    skipping = _start(path, good, system_kv={"errors": "skip"})
    assert [entry[0] for entry in skipping] == [str(good)]


def test_every_byte_counts(good: Path, tmp_path: Path) -> None:
    raw, rng = good.read_bytes(), random.Random(7)
    path = tmp_path / "flipped.relay"
    header = int.from_bytes(raw[:8], "little") + 8
    places = [rng.randrange(len(raw)) for _ in range(150)]
    places += [rng.randrange(header) for _ in range(50)]  # a random byte is hardly ever there
    path.write_bytes(raw)
    for place in places:
        with path.open("r+b") as file:
            file.seek(place)
            file.write(bytes([raw[place] ^ rng.randrange(1, 256)]))
        with pytest.raises(SystemKVError):
            SystemKVFile(path).verify()
        with path.open("r+b") as file:
            file.seek(place)
            file.write(raw[place : place + 1])
    SystemKVFile(path).verify()


def test_what_an_engine_cannot_use(good: Path) -> None:
    with pytest.raises(SystemKVError, match="prefix caching is off"):
        _start(good, enable_prefix_caching=False)
    with pytest.raises(SystemKVError, match="load format dummy"):
        _start(good, load_format="dummy")
    with pytest.raises(ValueError, match=r"system_kv\.budgets is unknown; known: files, budget"):
        _start(good, system_kv={"budgets": 0.5})
    ours = {
        "kv_connector": "SystemKVConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"files": [str(good)]},
    }
    from vllm.config import KVTransferConfig

    # the same files twice are what a second use of the same arguments looks like
    assert _start(good, kv_transfer_config=KVTransferConfig(**ours))
    with pytest.raises(ValueError, match="named twice"):
        _start(good.parent / "other.relay", kv_transfer_config=KVTransferConfig(**ours))
    with pytest.raises(ValueError, match="--kv-offloading-size replaces the connector"):
        _start(good, kv_offloading_size=1.0)
    other = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    several = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": [other, ours]},
    )
    with pytest.raises(SystemKVError, match="must be the first"):
        _start(good, additional_config={}, kv_transfer_config=several)


def _serve(*flags: str, **env: str) -> str:
    """Start a server that must refuse; returns its output."""
    done = subprocess.run(
        beside_python(
            "vllm", "serve", str(SMOLLM2), "--attention-backend", "relay", *SMALL, *flags
        ),
        env=environment(**{**OFFLINE, **env}),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode != 0
    return done.stdout + done.stderr


def test_a_server_says_it_in_its_last_line(good: Path, tmp_path: Path) -> None:
    path = _truncated(good, tmp_path)
    text = _serve("--additional-config.relay.system_kv", str(path))
    assert f"SystemKVError: {path}: is truncated: " in text.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("budget", "blocks", "said"),
    [
        (0.1, 40, r"need 5 of 39 KV cache blocks \(13%\); .*budget allows 10%, 3 blocks"),
        (0.5, 34, r"the other 28 cannot hold one request of max_model_len 2,048 \(32 blocks\)"),
    ],
    ids=["budget", "longest-request"],
)
def test_an_engine_does_not_start_over_its_budget(
    budget: float, blocks: int, said: str, good: Path, tmp_path: Path
) -> None:
    engine = {
        "model": str(SMOLLM2),
        "attention_backend": "relay",
        "additional_config": {"relay": {"system_kv": {"files": [str(good)], "budget": budget}}},
        "max_model_len": 2048,
        "block_size": 64,
        "num_gpu_blocks_override": blocks,
    }
    with pytest.raises(AssertionError, match=said):
        run_program(tmp_path, engine, [])


def test_a_server_told_to_skip_starts_without_the_bad_file_and_with_the_good_one(
    good: Path, tmp_path: Path
) -> None:
    bad = _edited(good, tmp_path)
    extra = {"files": [str(bad), str(good)], "errors": "skip"}
    connector = {
        "kv_connector": "SystemKVConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": extra,
    }
    log = tmp_path / "server.log"
    flags = [*SMALL, "--attention-backend", "relay", "--kv-transfer-config", json.dumps(connector)]
    with serving(SMOLLM2, flags, log, env={"VLLM_CPU_KVCACHE_SPACE": "1"}) as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
        for user in ("What do you sell?", "Are you open on Sundays?"):
            client.chat.completions.create(
                model=client.models.list().data[0].id,
                messages=[
                    {"role": "system", "content": MESSAGE},
                    {"role": "user", "content": user},
                ],
                max_completion_tokens=4,
            )
        with urllib.request.urlopen(f"{server.url}/metrics") as reply:
            metrics = reply.read().decode()
    text = log.read_text()
    assert f"relay: system KV not loaded: {bad}: the manifest is not the one" in text
    assert f"relay: system KV bakery ({SystemKVFile(good).seal[:8]} in metrics): " in text
    label = f'prompt="{SystemKVFile(good).seal[:8]}"'  # no prompt's name, unless asked for
    hits = re.findall(rf"vllm:relay_system_kv_requests_total{{[^}}]*{label}}} ([\d.]+)", metrics)
    assert hits == ["2.0"]
    assert re.search(rf"vllm:relay_system_kv_blocks{{[^}}]*{label}}} [\d.]+", metrics)
    assert "bakery" not in metrics
