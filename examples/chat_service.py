"""A chat service: the conversations of many users under one system prompt.

    python examples/chat_service.py MODEL [SYSTEM_PROMPT.txt]

The requests of a turn share the system prompt; what a user and the model have said is the context
of each. Requests to `vllm serve MODEL --attention-backend relay` share in the same way.
"""

import sys
from pathlib import Path

from vllm import LLM, SamplingParams

QUESTIONS = (
    "What is shared between requests?",
    "When does it help?",
    "Which engines are supported?",
    "What is a system KV?",
)


def run(llm: LLM, system_prompt: str, *, users: int = 16, turns: int = 2, tokens: int = 32):
    """The conversations, as lists of chat messages, after some turns of all users."""
    params = SamplingParams(temperature=0, max_tokens=tokens)
    chats = [[{"role": "system", "content": system_prompt}] for _ in range(users)]
    for turn in range(turns):
        for user, chat in enumerate(chats):
            question = QUESTIONS[(user + turn) % len(QUESTIONS)]
            chat.append({"role": "user", "content": question})
        for chat, done in zip(chats, llm.chat(chats, params, use_tqdm=False), strict=True):
            chat.append({"role": "assistant", "content": done.outputs[0].text})
    return chats


if __name__ == "__main__":
    model, *files = sys.argv[1:] or sys.exit(__doc__)
    prompt = Path(*files or [Path(__file__).parents[1] / "README.md"])
    llm = LLM(model, attention_backend="relay")
    for message in run(llm, prompt.read_text(encoding="utf-8"))[0][1:]:
        print(f"{message['role']}: {message['content'].strip()}")
    print(llm.collective_rpc("relay_counters"))
