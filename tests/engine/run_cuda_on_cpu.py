"""As run_engine.py, with the CUDA backend in the CPU engine: ``run_cuda_on_cpu.py SPEC RESULT``.

Scheduler, block tables, prefix caching and runner are the engine's own; FlashAttention is
`tests.reference_flash`; Triton runs in its interpreter (TRITON_INTERPRET=1). The engine
runs in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0).
"""

import json
import sys
from pathlib import Path


def put_cuda_backend() -> None:
    """Make the CUDA backend what ``--attention-backend relay`` finds on this platform."""
    import vllm_relay
    from tests import reference_flash

    vllm_relay.register()
    from vllm.v1.attention.backends import flash_attn

    reference_flash.install(lambda name, value: setattr(flash_attn, name, value))
    import vllm_relay.backend
    from vllm_relay.backend import cuda

    vllm_relay.backend.RelayBackend = cuda.RelayBackend  # type: ignore[misc]


if __name__ == "__main__":
    from tests.engine.run_engine import run

    spec_path, result_path = map(Path, sys.argv[1:])
    put_cuda_backend()
    result_path.write_text(json.dumps(run(json.loads(spec_path.read_text()))))
