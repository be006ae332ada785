"""Rollouts as GRPO draws them: n samples of each problem, with their advantages.

    python examples/grpo_rollouts.py MODEL

All samples share the worked examples, and those of a problem its text, where that fills a KV block.
The reward is 1 for samples that contain the sum, a stand-in for a verifier.
"""

import sys
from statistics import mean, pstdev

from vllm import LLM, SamplingParams

EXAMPLE = "Problem: What is {} plus {}?\nReasoning: {} and {} make {}.\nAnswer: {}\n\n"
PROBLEMS = [(17, 25), (38, 14), (51, 46), (29, 33)]


def instructions(examples: int) -> str:
    """Worked examples, the same for all problems."""
    pairs = [(3 * i + 2, 5 * i + 1) for i in range(examples)]
    return "".join(EXAMPLE.format(a, b, a, b, a + b, a + b) for a, b in pairs)


def reward(text: str, answer: int) -> float:
    """1 if the answer is among the words up to the next problem, else 0."""
    return float(str(answer) in text.partition("Problem:")[0].replace(".", " ").split())


def run(llm: LLM, *, examples: int = 60, samples: int = 8, tokens: int = 24):
    """Per problem, pairs of a sample's text and its advantage within the problem's samples."""
    head = instructions(examples)
    prompts = [f"{head}Problem: What is {a} plus {b}?\nReasoning:" for a, b in PROBLEMS]
    params = SamplingParams(n=samples, temperature=1.0, seed=0, max_tokens=tokens)
    rollouts = []
    for (a, b), done in zip(PROBLEMS, llm.generate(prompts, params, use_tqdm=False), strict=True):
        texts = [output.text for output in done.outputs]
        rewards = [reward(text, a + b) for text in texts]
        spread = pstdev(rewards) or 1.0
        advantages = [(value - mean(rewards)) / spread for value in rewards]
        rollouts.append(list(zip(texts, advantages, strict=True)))
    return rollouts


if __name__ == "__main__":
    (model,) = sys.argv[1:] or sys.exit(__doc__)
    llm = LLM(model, attention_backend="relay")
    for problem, samples in zip(PROBLEMS, run(llm), strict=True):
        print(problem, [round(advantage, 2) for _, advantage in samples])
    print(llm.collective_rpc("relay_counters"))
