"""Logits processor that forces the tokens of a request.

vLLM loads it by name: ``logits_processors=["benchmarks.harness.force_tokens:ForceTokens"]``.
"""

from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class ForceTokens(AdapterLogitsProcessor):
    """Produces the tokens of ``extra_args["force"]``; log-probabilities are of the real logits."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        forced = (params.extra_args or {}).get("force")
        if forced is None:
            return None

        def force(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            token = forced[len(output_ids)]
            masked = torch.full_like(logits, -torch.inf)
            masked[token] = 0.0
            return masked

        return force
