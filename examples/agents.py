"""Agents with tools: a tree of prefixes, the tools of all over the role of each.

    python examples/agents.py MODEL

All requests share the descriptions of the tools, those of an agent its role behind them. Relay
reads the tools once for all requests and a role once for its agent: two levels of sharing.
"""

import sys

from vllm import LLM, SamplingParams

TOOLS = ("search", "calendar", "mail", "files", "tickets", "database", "weather", "payments")
ROLES = ("support", "sales", "operations", "research")
TASKS = ("Summarise the week.", "Find the oldest open case.", "Draft a reply.", "Plan tomorrow.")


def tools() -> str:
    """The descriptions of all tools, as a system prompt has them."""
    text = "\n".join(
        f'{{"name": "{tool}_{verb}", "description": "{verb} in {tool}, for the signed-in user", '
        f'"parameters": {{"query": "string", "limit": "integer", "reason": "string"}}}}'
        for tool in TOOLS
        for verb in ("list", "read", "write", "delete")
    )
    return f"You call one of these tools, or answer.\n{text}\n"


def role(name: str) -> str:
    """The instructions of an agent."""
    rules = (f"Rule {i} of {name}: look at case {i} first, then say why." for i in range(24))
    return f"You are the {name} agent.\n" + "\n".join(rules)


def run(llm: LLM, *, tokens: int = 32) -> dict[str, list[str]]:
    """The answers of each agent to all tasks."""
    system = {name: tools() + role(name) for name in ROLES}
    chats = [
        [{"role": "system", "content": system[name]}, {"role": "user", "content": task}]
        for name in ROLES
        for task in TASKS
    ]
    params = SamplingParams(temperature=0, max_tokens=tokens)
    texts = iter([done.outputs[0].text for done in llm.chat(chats, params, use_tqdm=False)])
    return {name: [next(texts) for _ in TASKS] for name in ROLES}


if __name__ == "__main__":
    (model,) = sys.argv[1:] or sys.exit(__doc__)
    llm = LLM(model, attention_backend="relay")
    for name, texts in run(llm).items():
        print(f"{name}: {TASKS[0]} {texts[0].strip()[:60]!r}")
    print(llm.collective_rpc("relay_counters"))
