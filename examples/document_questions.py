"""Questions about documents: one group of requests per document, several in a batch.

    python examples/document_questions.py MODEL [DOCUMENT.txt ...]

The document comes first in the prompt and the question last: only what lies before the first
difference is shared.
"""

import sys
from pathlib import Path

from vllm import LLM, SamplingParams

QUESTIONS = (
    "What is this document about?",
    "Who should read it?",
    "Name one limit that it states.",
    "Name one number that it states.",
    "Which command does it show first?",
    "Summarise it in one sentence.",
    "What does it leave open?",
    "Which word does it explain?",
)


def run(llm: LLM, documents: list[str], *, tokens: int = 32) -> list[list[str]]:
    """The answers to all questions, per document."""
    prompts = [
        f"{document}\n\nQuestion: {question}\nAnswer:"
        for document in documents
        for question in QUESTIONS
    ]
    params = SamplingParams(temperature=0, max_tokens=tokens)
    texts = [done.outputs[0].text for done in llm.generate(prompts, params, use_tqdm=False)]
    return [texts[i : i + len(QUESTIONS)] for i in range(0, len(texts), len(QUESTIONS))]


if __name__ == "__main__":
    model, *names = sys.argv[1:] or sys.exit(__doc__)
    docs = Path(__file__).parents[1] / "docs"
    names = names or [docs / "decide.md", docs / "planning.md"]
    llm = LLM(model, attention_backend="relay")
    answers = run(llm, [Path(name).read_text(encoding="utf-8") for name in names])
    for name, texts in zip(names, answers, strict=True):
        print(f"{name}\n  {QUESTIONS[0]} {texts[0].strip()}")
    print(llm.collective_rpc("relay_counters"))
