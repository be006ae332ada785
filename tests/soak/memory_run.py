"""A full KV cache and steps of 8,192 tokens: see `memory`.

memory_run.py MODEL RESULT.json MAX_COPY_GIB
"""

import json
import sys
from pathlib import Path

import numpy as np

from tests.soak.memory import SHARED, STEP_TOKENS

# As many as nearly fill the KV cache, each read by some requests of one more block.
PREFIXES, READERS = 47, 2


def main(model: str, result: Path, max_copy_gib: float | None) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        attention_backend="relay",
        additional_config={"relay": {"min_saved_tokens": 0, "max_copy_gib": max_copy_gib}},
        worker_extension_cls="tests.engine.in_worker.WorkerExtension",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=8192,
        max_num_seqs=128,
        max_num_batched_tokens=STEP_TOKENS,
        block_size=128,
        seed=0,
    )
    rng = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return rng.integers(3, 2000, size=count).tolist()

    def generate(prompts: list[list[int]], steps: int) -> None:
        params = SamplingParams(max_tokens=steps, ignore_eos=True, temperature=0, detokenize=False)
        llm.generate([{"prompt_token_ids": x} for x in prompts], params, use_tqdm=False)

    llm.collective_rpc("watch_steps")
    prefixes = [tokens(SHARED) for _ in range(PREFIXES)]
    for prefix in prefixes[:6]:  # steps of 32 x 256 tokens behind one prefix
        generate([prefix], 1)
        generate([prefix + tokens(256) for _ in range(64)], 4)
    # More than the KV cache holds, and decodes behind all prefixes at once: copies of each.
    generate([tokens(7000) for _ in range(10)], 2)
    generate(prefixes, 1)
    generate([prefix + tokens(20) for prefix in prefixes for _ in range(READERS)], 100)
    (seen,), (counters,) = llm.collective_rpc("seen_steps"), llm.collective_rpc("counters")
    cache = llm.llm_engine.vllm_config.cache_config
    found = {
        "kv_bytes": cache.kv_cache_memory_bytes,
        "rows_of_256_queries": seen["queries"].get(256, 0),
        "steps_relayed": counters["steps_relayed"],
        "fallbacks": counters["fallbacks"],
        "packed_bytes": llm.collective_rpc("watched")[0]["packed_bytes"],
    }
    result.write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
