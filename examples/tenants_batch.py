"""An offline batch of many tenants: requests come mixed, and run tenant by tenant.

    python examples/tenants_batch.py MODEL

Each tenant has a prompt of its own. `vllm_relay.order` puts the requests of a tenant next to one
another, so that they share its prompt while it is in the KV cache; answers come back in the order
of the requests.
"""

import random
import sys

from vllm import LLM, SamplingParams

import vllm_relay


def requests(tenants: int, each: int, rules: int) -> list[str]:
    """Prompts of all tenants, shuffled."""
    prompts = []
    for tenant in range(tenants):
        head = "\n".join(f"Tenant {tenant}, rule {i}: reply in {i} words." for i in range(rules))
        prompts += [f"{head}\nRequest {i}: classify ticket {97 * i}.\nReply:" for i in range(each)]
    return random.Random(0).sample(prompts, len(prompts))


def run(llm: LLM, prompts: list[str], *, tokens: int = 16) -> list[str]:
    """The answers, in the order of the prompts."""
    at = vllm_relay.order(prompts)
    params = SamplingParams(temperature=0, max_tokens=tokens)
    done = llm.generate([prompts[i] for i in at], params, use_tqdm=False)
    texts = [""] * len(prompts)
    for i, output in zip(at, done, strict=True):
        texts[i] = output.outputs[0].text
    return texts


if __name__ == "__main__":
    (model,) = sys.argv[1:] or sys.exit(__doc__)
    llm = LLM(model, attention_backend="relay", max_num_seqs=16)
    prompts = requests(tenants=8, each=16, rules=80)
    for prompt, text in list(zip(prompts, run(llm, prompts), strict=True))[:4]:
        print(f"{prompt[:9]}: {text.strip()[:60]!r}")
    print(llm.collective_rpc("relay_counters"))
