"""From what an operator writes to the tokens that every request begins with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# What may follow a system prompt. Two texts begin with different characters, so that a tokenizer
# cannot join the prompt's last token with both; the last has been answered already.
_USERS = ("Hello", "0", "\n", " a", "é")
_ANSWER = "Yes."


@dataclass(frozen=True)
class Prompt:
    """A prompt to build a file from.

    Attributes:
        name: of the file in logs and counters.
        kind: "system-prompt", "text" or "token-ids".
        token_ids: what is stored.
        note: something its author should know, or None.
    """

    name: str
    kind: str
    token_ids: tuple[int, ...]
    note: str | None = None


def from_system_message(
    name: str,
    message: str,
    tokenizer: Any,
    *,
    chat_template: str | None = None,
    tools: Sequence[Any] | None = None,
    template_kwargs: dict[str, Any] | None = None,
) -> Prompt:
    """The longest run of tokens with which every conversation under a system message begins.

    It is found by rendering several conversations and comparing their tokens. A date that the
    template writes ends it: tomorrow's conversations begin otherwise.

    Args:
        name: of the prompt. message: the system message.
        tokenizer: a Hugging Face tokenizer. chat_template: its text; None for the tokenizer's own.
        tools, template_kwargs: as given to the template with every request.

    Raises:
        ValueError: the template does not put the system message first, or does not accept one.
    """

    def render(user: str, answered: bool, **more: Any) -> list[int]:
        messages = [{"role": "system", "content": message}, {"role": "user", "content": user}]
        if answered:
            messages.append({"role": "assistant", "content": _ANSWER})
            messages.append({"role": "user", "content": user})
        text = tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=chat_template,
            add_generation_prompt=True,
            tokenize=False,
            **(template_kwargs or {}),
            **more,
        )
        # as vLLM's chat API does: the template has written the special tokens
        return list(tokenizer.encode(text, add_special_tokens=False))

    try:
        today = [render(user, answered) for user in _USERS for answered in (False, True)]
    except Exception as error:
        raise ValueError(f"prompt {name}: the chat template cannot render it: {error}") from error
    # A template asks for the date by calling this function.
    other_day = render(_USERS[0], False, strftime_now=lambda form: "\0")
    stored = common_prefix([*today, other_day])
    without = common_prefix(today)
    note = None
    if len(stored) < len(without):
        note = (
            f"the chat template writes the current date: {len(stored):,} tokens before it are "
            f"stored, {len(without) - len(stored):,} after it are not"
        )
    if not stored or tokenizer.decode(without).find(message.strip()[:40]) < 0:
        raise ValueError(
            f"prompt {name}: conversations under this system message do not begin with it in common"
        )
    return Prompt(name, "system-prompt", tuple(stored), note)


def from_text(name: str, text: str, tokenizer: Any) -> Prompt:
    """The tokens that every completion request whose prompt begins with a text begins with.

    The text's last token is left out where a tokenizer may join it with what follows.

    Raises:
        ValueError: nothing is left.
    """
    encode: Callable[[str], list[int]] = tokenizer.encode
    stored = common_prefix([list(encode(text + more)) for more in ("", *_USERS)])
    if not stored:
        raise ValueError(f"prompt {name}: no tokens")
    return Prompt(name, "text", tuple(stored))


def common_prefix(sequences: Sequence[Sequence[int]]) -> list[int]:
    """The longest beginning that all sequences have in common."""
    shortest = min(map(len, sequences))
    first = sequences[0]
    for i in range(shortest):
        if any(tokens[i] != first[i] for tokens in sequences):
            return list(first[:i])
    return list(first[:shortest])
