"""From a message to tokens, with a real tokenizer: what is stored, every request begins with."""

from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.engine.engine import SMOLLM2
from vllm_relay.system_kv.prompts import common_prefix, from_system_message, from_text

MESSAGE = (
    "You are the assistant of Acme Corp.\n\n1. Answer briefly.\n2. Never mention prices: 12 €."
)
# None of them is among those that the code tries.
TEXTS = (
    "", "a", "Why?", "hello", "7", "12", "3.14", ".", ",", "'s", ":", "-", "(", '"', "<", "|",
    " ", "  ", " b", "\n\n", "\n\n\n", "\nx", " \n", "\t", "\r\n", "\u00a0", "\u200b", "\ufeff",
    "ü", "e\u0301", "\u0301", "日本語", "你好", "مرحبا", "🙂", "\U0001f468\u200d\U0001f469", "\0",
    "user", "system\nYou", "<|im_end|>", "<|im_start|>system", MESSAGE, "x" * 1000,
)  # fmt: skip
USER_GLUED = "{{ messages[0]['content'] + messages[1]['content'] }}"
DATED = (
    "{{ '<|im_start|>system\n' }}{before}{{ strftime_now('%d %B %Y') }}{after}{{ '<|im_end|>\n' }}"
    "{% for message in messages[1:] %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(SMOLLM2)


def conversations(message: str, text: str) -> list[list[dict[str, str]]]:
    """Conversations under a system message in which a user begins with a text."""
    system, user = {"role": "system", "content": message}, {"role": "user", "content": text}
    answer = {"role": "assistant", "content": text or "I see."}
    return [
        [system, user],
        [system, user, answer, {"role": "user", "content": "And then?"}],
        [system, user, answer, user, answer, user],
    ]


def tokens_of(tokenizer: Any, messages: list[dict[str, str]], **more: Any) -> list[int]:
    """As a server makes them: rendered and tokenized by the tokenizer itself."""
    rendered = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, **more
    )
    return list(rendered["input_ids"])


# System messages


@pytest.mark.parametrize(
    "message",
    [
        MESSAGE,
        "Hi",
        "",
        "  around  ",
        "12",
        "ends in a line break\n",
        "日本語で答えて。",
        "a\r\n\tb",
    ],
)
def test_every_conversation_begins_with_the_stored_tokens(tokenizer: Any, message: str) -> None:
    prompt = from_system_message("acme", message, tokenizer)
    stored = list(prompt.token_ids)
    assert (prompt.name, prompt.kind, prompt.note) == ("acme", "system-prompt", None)
    assert message in tokenizer.decode(stored)
    following = set()
    for text in TEXTS:
        for messages in conversations(message, text):
            tokens = tokens_of(tokenizer, messages)
            assert tokens[: len(stored)] == stored, text
            following.add(tokens[len(stored)])
    assert len(following) > 1, "one more token would be common"


def test_the_beginning_of_the_users_turn_is_stored_too(tokenizer: Any) -> None:
    prompt = from_system_message("acme", "Be brief.", tokenizer)
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user"
    assert list(prompt.token_ids) == tokenizer.encode(text, add_special_tokens=False)


def test_another_template_its_settings_and_tools_are_in_the_tokens(tokenizer: Any) -> None:
    template = (
        "{{ mood }}: {{ messages[0]['content'] }} {{ tools | tojson }}"
        "{% for message in messages[1:] %}<|im_start|>{{ message['content'] }}{% endfor %}"
    )
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    prompt = from_system_message(
        "acme",
        MESSAGE,
        tokenizer,
        chat_template=template,
        tools=tools,
        template_kwargs={"mood": "sunny"},
    )
    text = tokenizer.decode(prompt.token_ids)
    assert text.startswith(f"sunny: {MESSAGE} ") and "weather" in text
    for messages in conversations(MESSAGE, "Why?"):
        tokens = tokens_of(tokenizer, messages, chat_template=template, tools=tools, mood="sunny")
        assert common_prefix([tokens, prompt.token_ids]) == list(prompt.token_ids)


def test_a_date_ends_what_is_stored_and_a_note_says_so(tokenizer: Any) -> None:
    template = DATED.replace("{before}", "{{ messages[0]['content'] }}\nToday is ")
    template = template.replace("{after}", ".")
    prompt = from_system_message("acme", "Be brief.", tokenizer, chat_template=template)
    # The space before it may be joined with more of them.
    text = "<|im_start|>system\nBe brief.\nToday is"
    stored = list(prompt.token_ids)
    assert tokenizer.decode(stored) == text
    whole = tokens_of(tokenizer, conversations("Be brief.", "Why?")[0], chat_template=template)
    undated = common_prefix(
        [
            tokens_of(tokenizer, conversations("Be brief.", other)[0], chat_template=template)
            for other in TEXTS
        ]
    )
    assert len(stored) < len(undated) < len(whole)
    assert prompt.note == (
        f"the chat template writes the current date: {len(stored)} tokens before it are stored, "
        f"{len(undated) - len(stored)} after it are not"
    )
    for day in ("01 January 2030", "29 February 2028", "30 November 1999"):
        tokens = tokens_of(
            tokenizer,
            conversations("Be brief.", "Why?")[1],
            chat_template=template,
            strftime_now=lambda form, day=day: day,
        )
        assert tokens != whole and tokens[: len(stored)] == stored


def test_a_date_before_the_message_leaves_little_and_the_note_tells_how_little(
    tokenizer: Any,
) -> None:
    template = DATED.replace("{before}", "Today is ")
    template = template.replace("{after}", ". {{ messages[0]['content'] }}")
    prompt = from_system_message("acme", MESSAGE, tokenizer, chat_template=template)
    assert tokenizer.decode(prompt.token_ids) == "<|im_start|>system\nToday is"
    assert f"{len(prompt.token_ids)} tokens before it are stored" in str(prompt.note)


def test_nothing_but_a_date_in_common_is_refused(tokenizer: Any) -> None:
    template = "{{ strftime_now('%d') }}{{ messages[0]['content'] }}<|im_start|>"
    with pytest.raises(ValueError, match=r"^prompt acme: "):
        from_system_message("acme", MESSAGE, tokenizer, chat_template=template)


@pytest.mark.parametrize(
    "template",
    [
        # the user first
        "{{ messages[-1]['content'] }}<|im_end|>{{ messages[0]['content'] }}",
        # the user first, after what all conversations have in common
        "<|im_start|>{{ messages[-1]['content'] }}<|im_end|>{{ messages[0]['content'] }}",
        # no system message at all
        "{% for message in messages[1:] %}<|im_start|>{{ message['content'] }}{% endfor %}",
    ],
)
def test_a_template_without_the_message_in_front_is_refused(tokenizer: Any, template: str) -> None:
    with pytest.raises(ValueError) as caught:
        from_system_message("acme", MESSAGE, tokenizer, chat_template=template)
    assert str(caught.value) == (
        "prompt acme: conversations under this system message do not begin with it in common"
    )


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            "{% if messages[0]['role'] == 'system' %}"
            "{{ raise_exception('System role not supported') }}{% endif %}",
            "System role not supported",
        ),
        ("{% if %}", "Expected an expression"),
        ("{{ missing.content }}", "'missing' is undefined"),
    ],
)
def test_a_template_that_cannot_render_is_refused_with_its_reason(
    tokenizer: Any, template: str, reason: str
) -> None:
    with pytest.raises(
        ValueError, match=f"^prompt acme: the chat template cannot render it: .*{reason}"
    ):
        from_system_message("acme", MESSAGE, tokenizer, chat_template=template)


# Texts


@pytest.mark.parametrize("text", ["It costs 12", "<|im_start|>system\nHi<|im_end|>", "\n\n1 + 1"])
def test_a_text_whose_last_token_merges_with_nothing_is_stored_whole(
    tokenizer: Any, text: str
) -> None:
    # digits and special tokens stand alone in this tokenizer
    prompt = from_text("acme", text, tokenizer)
    stored = list(prompt.token_ids)
    assert (prompt.name, prompt.kind, prompt.note) == ("acme", "text", None)
    assert stored == tokenizer.encode(text)
    for more in TEXTS:
        assert tokenizer.encode(text + more)[: len(stored)] == stored, more


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        ("Hello ", "Hello"),  # a space goes with the word that follows
        ("Hello\n", "Hello"),  # line breaks with more of them
        ("a  ", "a"),
    ],
)
def test_white_space_at_the_end_is_left_to_what_follows(
    tokenizer: Any, text: str, stored: str
) -> None:
    assert tokenizer.decode(from_text("acme", text, tokenizer).token_ids) == stored


# How a text goes on so that the tokenizer makes one token of its end and what follows.
MERGES = [("I like to walk", "ing"), ("An intern", "ational"), ("A document.", "."), ("f(", ")")]


@pytest.mark.parametrize(("text", "more"), MERGES)
def test_these_texts_do_merge(tokenizer: Any, text: str, more: str) -> None:
    alone = tokenizer.encode(text)
    assert tokenizer.encode(text + more)[: len(alone)] != alone


@pytest.mark.parametrize(("text", "more"), MERGES)
def test_a_last_token_that_merges_with_what_follows_is_left_out(
    tokenizer: Any, text: str, more: str
) -> None:
    whole = tokenizer.encode(text + more)
    stored = list(from_text("acme", text, tokenizer).token_ids)
    assert whole[: len(stored)] == stored


@pytest.mark.parametrize(("message", "user"), MERGES[:3])
def test_a_message_that_merges_with_the_users_text_loses_its_last_token(
    tokenizer: Any, message: str, user: str
) -> None:
    prompt = from_system_message("acme", message, tokenizer, chat_template=USER_GLUED)
    stored = list(prompt.token_ids)
    assert tokenizer.encode(message + user)[: len(stored)] == stored


def test_a_text_of_which_nothing_is_sure_to_stay_is_refused(tokenizer: Any) -> None:
    for text in ("", " ", "\n", "Hello"):  # "Hellon" is two other tokens
        with pytest.raises(ValueError, match=r"^prompt acme: no tokens$"):
            from_text("acme", text, tokenizer)


# What is common


def test_the_common_prefix_is_the_longest() -> None:
    assert common_prefix([[1, 2, 3]]) == [1, 2, 3]
    assert common_prefix([[1, 2, 3], [1, 2, 4], [1, 2, 3, 4]]) == [1, 2]
    assert common_prefix([[1, 2], [1, 2, 3]]) == [1, 2]
    assert common_prefix([[1, 2, 3], (1, 2)]) == [1, 2]
    assert common_prefix([[1], [2]]) == common_prefix([[], [1]]) == []
