"""Prompts to build files from: the tokens that every request under a message or text shares."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from vllm_relay.system_kv.manifest import Kind

# Possible continuations of a text, beside those that the vocabulary suggests.
_CONTINUATIONS = ("\n", " ", " a", "0", "a", "'s", ".", "é", "日本", "🙂")
# User messages of the conversations that are compared; they begin with different characters.
_USERS = ("Hello", "0", "\n", " a", "é")
_ANSWER = "Yes."
_OTHER_MESSAGE = "\u2021 another message"
# Characters at the end of a text that are tokenized with continuations, or a few more.
_TAIL = 128


@dataclass(frozen=True)
class Prompt:
    """A prompt to build a file from.

    Attributes:
        name: in logs and counters. kind: "system-prompt", "text" or "token-ids".
        note: a remark for the author, or None.
    """

    name: str
    kind: Kind
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
    """The longest token prefix of all conversations under a system message.

    Several conversations are rendered and compared. The prefix ends where the template writes the
    date, which changes, and before a token that may merge with a user's first characters.

    Args:
        tokenizer: a Hugging Face tokenizer. chat_template: its text; None for the tokenizer's own.
        tools, template_kwargs: given to the template with every request.

    Raises:
        ValueError: the template does not put the system message first, or does not accept one.
    """

    def render(user: str, answered: bool, message: str = message, **more: Any) -> str:
        messages = [{"role": "system", "content": message}, {"role": "user", "content": user}]
        if answered:
            messages.append({"role": "assistant", "content": _ANSWER})
            messages.append({"role": "user", "content": user})
        try:
            return str(
                tokenizer.apply_chat_template(
                    messages,
                    tools=tools,
                    chat_template=chat_template,
                    add_generation_prompt=True,
                    tokenize=False,
                    **(template_kwargs or {}),
                    **more,
                )
            )
        except Exception as error:
            raise ValueError(
                f"prompt {name}: the chat template cannot render it: {error}"
            ) from error

    def stored_of(texts: Sequence[str]) -> list[int]:
        # The template has written the special tokens, as in vLLM's chat API.
        return _stable_tokens("".join(common_prefix(texts)), tokenizer, add_special_tokens=False)

    today = [render(user, answered) for user in _USERS for answered in (False, True)]
    # Templates call this function for the date.
    other_day = render(_USERS[0], False, strftime_now=lambda form: "\0")
    stored, undated = stored_of([*today, other_day]), stored_of(today)
    note = None
    if len(stored) < len(undated):
        note = (
            f"the chat template writes the current date: {len(stored):,} tokens before it are "
            f"stored, {len(undated) - len(stored):,} after it are not"
        )
    common = "".join(common_prefix(today))
    if not stored or render(_USERS[0], False, message=_OTHER_MESSAGE).startswith(common):
        raise ValueError(
            f"prompt {name}: conversations under this system message do not begin with it in common"
        )
    return Prompt(name, "system-prompt", tuple(stored), note)


def from_text(name: str, text: str, tokenizer: Any) -> Prompt:
    """The longest token prefix of all completion requests whose prompt begins with a text.

    Raises ValueError if there is none.
    """
    stored = _stable_tokens(text, tokenizer, add_special_tokens=True)
    if not stored:
        raise ValueError(f"prompt {name}: no tokens")
    return Prompt(name, "text", tuple(stored))


def _stable_tokens(text: str, tokenizer: Any, *, add_special_tokens: bool) -> list[int]:
    """The tokens of a text that stay the same whatever follows it.

    A token that merges the text's end with a continuation is in the vocabulary, so all such
    continuations are known and tried.
    """
    begin = max(0, len(text) - _TAIL)
    # Tokenizers start over at a space after a word.
    while begin and not (text[begin] == " " and not text[begin - 1].isspace()):
        begin -= 1
    tail = text[begin:]
    base = list(tokenizer.encode(tail, add_special_tokens=False))
    joined, cut = _joined(tail, tokenizer)
    others = [tail + more for more in {*_CONTINUATIONS, *joined}] + [tail[:-n] for n in cut]
    kept = min(
        len(common_prefix([base, tokens]))
        for tokens in tokenizer(others, add_special_tokens=False)["input_ids"]
    )
    tokens = list(tokenizer.encode(text, add_special_tokens=add_special_tokens))
    if add_special_tokens:  # some tokenizers end a text with one
        bare = list(tokenizer.encode(text, add_special_tokens=False))
        tokens = tokens[: len(bare) + _position(bare, tokens)]
    return tokens[: max(0, len(tokens) - (len(base) - kept))]


def _position(part: Sequence[int], whole: Sequence[int]) -> int:
    """The index of a text's tokens among those with special tokens around them."""
    for begin in range(len(whole) - len(part) + 1):
        if list(whole[begin : begin + len(part)]) == list(part):
            return begin
    return 0


def _joined(text: str, tokenizer: Any) -> tuple[set[str], set[int]]:
    """Tokens that may merge the end of a text with its continuation: the rest of each after it.

    And, of tokens that end inside a character, how many of the text's characters they hold.
    """
    joined, cut = set(), set()
    if not text.isascii() and not text[-1].isascii():
        cut.add(1)  # a token may begin inside the last character
    for token in tokenizer.get_vocab():
        if "▁" in token:  # SentencePiece's space
            written = token.replace("▁", " ")
        else:
            written = tokenizer.convert_tokens_to_string([token])
        whole = written.find("\ufffd")
        for length in range(1, len(written) if whole < 0 else whole + 1):
            if text.endswith(written[:length]):
                if whole < 0:
                    joined.add(written[length:])
                elif length == whole:
                    cut.add(length)
    return joined, cut


def common_prefix(sequences: Sequence[Sequence[Any]]) -> list[Any]:
    """The longest common prefix of sequences, as a list of items."""
    common = takewhile(lambda items: len(set(items)) == 1, zip(*sequences, strict=False))
    return [items[0] for items in common]
