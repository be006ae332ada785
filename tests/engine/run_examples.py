"""Examples, one after another on one engine: ``run_examples.py SPEC.json RESULT.json``.

SPEC: ``engine`` (arguments of `vllm.LLM`), ``runs`` (name of an example, arguments of its ``run``).
RESULT: ``runs``, of each what it ``returned`` and the ``counters`` that it added.
"""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(spec: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM

    llm = LLM(**spec["engine"])

    def counters() -> dict[str, float]:
        return llm.collective_rpc("relay_counters")[0]

    results = []
    for name, arguments in spec["runs"]:
        before = counters()
        returned = runpy.run_path(str(EXAMPLES / f"{name}.py"))["run"](llm, **arguments)
        added = {key: value - before[key] for key, value in counters().items()}
        results.append({"returned": returned, "counters": added})
    return {"runs": results}


if __name__ == "__main__":
    spec_path, result_path = map(Path, sys.argv[1:])
    result_path.write_text(json.dumps(run(json.loads(spec_path.read_text()))))
