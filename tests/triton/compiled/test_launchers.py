"""The C launchers that Triton before 3.7 makes of each specialisation, for the host to call."""

import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from triton.backends.nvidia import driver as nvidia

from tests.triton.compiled.test_specialisations import GRAPHS, KERNELS, Met, run_steps
from tests.triton.compiled.test_specialisations import met as met


@pytest.mark.skipif(
    not hasattr(nvidia, "make_launcher"), reason="this Triton has one launcher for all kernels"
)
def test_launchers_compile(met: Met, tmp_path: Path) -> None:
    run_steps(GRAPHS[::-8], levels=2, dense=True)
    sources = {
        name: nvidia.make_launcher(given["constants"], given["signature"], None)
        for name, made in met.items()
        for given in made.values()
    }
    assert set(sources) == KERNELS
    headers = Path(nvidia.__file__).parent / "include", sysconfig.get_paths()["include"]
    for name, source in sources.items():
        path = tmp_path / f"{name}.c"
        path.write_text(source)
        command: list[Any] = ["gcc", "-fsyntax-only", *(f"-I{x}" for x in headers), path]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
