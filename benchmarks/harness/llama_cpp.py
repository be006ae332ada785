"""llama.cpp's server, as `make llama` builds it, with the demo model's weights in bf16."""

import json
import urllib.request
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from benchmarks.harness.environment import HUGE_PAGES
from tools.make_llama_cpp import SERVER, target_folder
from vllm_relay.serving.processes import Process, Server, free_port

FOLDER = target_folder()
# Settings of attention and the KV cache: name -> options.
SETTINGS = {
    f"flash attention {flash}, {kv} KV, {'one buffer' if unified else 'a buffer per slot'}": [
        *("--flash-attn", flash, "--cache-type-k", kv, "--cache-type-v", kv),
        "--kv-unified" if unified else "--no-kv-unified",
    ]
    for flash, kv, unified in product(("off", "on"), ("f16", "bf16"), (True, False))
}


class LlamaServer(Server):
    """``llama-server`` on a free local port.

    Args:
        model: folder of the model that the weights are of: the client takes its tokenizer.
        slots: requests served at once. tokens: of each, the prompt's and the answer's.
        cores: one thread on each. flags: of `SETTINGS`.

    Raises:
        FileNotFoundError: it was not built.
    """

    def __init__(
        self,
        model: Path,
        slots: int,
        tokens: int,
        cores: Sequence[int],
        flags: Sequence[str],
        log: Path,
    ) -> None:
        program, weights = FOLDER / SERVER, FOLDER / f"{model.name}-bf16.gguf"
        for path in (program, weights):
            if not path.is_file():
                raise FileNotFoundError(f"no {path.name} in .llama.cpp: run `make llama`")
        self.slots = slots
        port = str(free_port())
        self.url, self.model, self.name = f"http://127.0.0.1:{port}", model, str(model)
        command = [str(program), "--model", str(weights), "--host", "127.0.0.1", "--port", port]
        command += ["--parallel", str(slots), "--ctx-size", str(slots * tokens), "--no-ui"]
        command += ["--threads", str(len(cores)), "--cpu-strict", "1"]
        command += ["--cpu-mask", f"{sum(1 << core for core in cores):x}"]
        # Weights in memory of its own, as vLLM has them. A cache of prompts that no slot holds
        # would be for nothing: each slot keeps its own. vLLM's client cannot read pings.
        command += ["--load-mode", "none", "--cache-ram", "0", "--sse-ping-interval", "-1"]
        command += ["--slot-save-path", str(log.parent)]
        Process.__init__(self, [*command, *flags], log, HUGE_PAGES)

    def fill(self, prompt: str) -> None:
        """Put the KV of a prompt in every slot: computed once, then copied through a file."""
        self._post("/completion", prompt=prompt, n_predict=0, id_slot=0)
        name = f"{self.log.stem}.kv"
        self._post("/slots/0?action=save", filename=name)
        for slot in range(1, self.slots):
            self._post(f"/slots/{slot}?action=restore", filename=name)
        (self.log.parent / name).unlink()

    def _post(self, path: str, **data: str | int) -> None:
        body = json.dumps(data).encode()
        headers = {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(self.url + path, body, headers)):
            pass
