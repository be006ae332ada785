"""A process that is killed while it writes leaves a whole file under the name, or none."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.engine.engine import environment
from vllm_relay.system_kv.file import SystemKVFile

WRITE = """
import sys
from pathlib import Path
import torch
from tests.unit.system_kv.files import small_manifest
from vllm_relay.system_kv.file import write_file
from vllm_relay.system_kv.manifest import Layer
path = Path(sys.argv[1])
scratch = path.parent / "scratch"
scratch.mkdir(exist_ok=True)
manifest = small_manifest(token_ids=tuple(range(2000)), layers=(Layer("layer", 64, 128),))
names, shape = ("layer.k", "layer.v"), (2000, 64, 128)
contents = [
    {name: torch.full(shape, seed, dtype=torch.bfloat16) for name in names} for seed in range(2)
]
print("ready", flush=True)
while True:
    for tensors in contents:
        write_file(path, manifest, tensors, scratch)
"""


def test_ten_times(tmp_path: Path) -> None:
    rng, path, unfinished = random.Random(1), tmp_path / "acme.relay", 0
    for _ in range(10):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITE, path], env=environment(), stdout=subprocess.PIPE
        )
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        time.sleep(rng.uniform(0.1, 1.0))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        unfinished += any((tmp_path / "scratch").iterdir())
        if path.exists():
            SystemKVFile(path).verify()
    assert path.exists()
    assert unfinished >= 3  # the kills did come while a file was being written
