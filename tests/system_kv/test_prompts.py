"""From a message to tokens, with a real tokenizer: what is stored, every request begins with."""

import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.e2e.engine import ROOT, SMOLLM2
from vllm_relay.system_kv.prompts import (
    _stable_tokens,
    common_prefix,
    from_system_message,
    from_text,
)

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


# Whatever follows

GPL = (ROOT / "benchmarks" / "text" / "gpl-3.txt").read_text()
MULTILINGUAL = (
    "日本語で答えてください。東京は雨です、「はい」とだけ。",
    "你好，世界！今天天气怎么样？请用中文回答。",  # noqa: RUF001
    "안녕하세요 세계, 오늘 날씨는 어떻습니까?",
    "مرحبا بالعالم، كيف حالك اليوم؟",
    "Привет, мир! Как дела? По-русски, пожалуйста.",
    "नमस्ते दुनिया, आप कैसे हैं?",
    "ไม่เป็นไร ขอบคุณครับ",
    "Ünïcödé, façade, naïve “quotes” … don\u2019t, e\u0301a\u0308\u00a0\u2003\u200b\ufeff.",
    "🙂 👨\u200d👩\u200d👧 🇩🇪 🏳️\u200d🌈 ✅ done",
    "I'm, you're, we'll, they've, he'd, it's, can't, 'S, 'LL",
    'def f(x):\n    return x ** 2  # noqa\n\n\nclass A:\n\tpass\r\n\r\n{"a": [1, 2.50, null]}',
    "3.14159 1,000,000 12:30 0x1F ==== ---- ____ **** //// <|im_start|>user\nHi<|im_end|>",
)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
LLAMA3 = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(
            Regex(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
            "isolated",
        ),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)


def byte_level(split: Any, texts: Iterable[str], size: int = 4000) -> Any:
    """A tokenizer of the kind of GPT-2's, trained on texts."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = split, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made)


def sentence_piece(texts: Iterable[str]) -> Any:
    """One of the kind of Llama 2's: spaces are written as ▁, unknown characters as their bytes."""
    made = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.pre_tokenizer = pre_tokenizers.Split(Regex("▁*[^▁]*"), "isolated")
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=4000, special_tokens=special, show_progress=False)
    made.train_from_iterator(texts, trainer)
    made.pre_tokenizer = None  # it was for training: the real one does not split
    return PreTrainedTokenizerFast(tokenizer_object=made)


TOKENIZERS = {
    "SmolLM2": lambda: AutoTokenizer.from_pretrained(SMOLLM2),
    "GPT-2": lambda: byte_level(GPT2, [GPL]),
    "Llama 3": lambda: byte_level(LLAMA3, [GPL]),
    "SentencePiece": lambda: sentence_piece([GPL, *MULTILINGUAL]),
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def any_tokenizer(request: pytest.FixtureRequest) -> Any:
    return TOKENIZERS[request.param]()


def excerpts(count: int, seed: int) -> list[tuple[str, list[str]]]:
    """Texts cut out anywhere, each with many that may follow: the first is how it really went on.

    The same for the same seed.
    """
    chance = random.Random(seed)

    def cut(longest: int) -> tuple[str, str]:
        source = chance.choice([*MULTILINGUAL, *[GPL] * len(MULTILINGUAL)])
        begin = chance.randrange(len(source))
        end = chance.randint(begin + 1, min(begin + longest, len(source)))
        return source[begin:end], source[end : end + 40]

    made = []
    for _ in range(count):
        (before, _), (text, follows) = cut(40), cut(chance.choice((3, 30, 300)))
        others = [cut(chance.choice((1, 5, 40)))[0] for _ in range(30)]
        again = [text[-1] * chance.randint(1, 40)]
        made.append((before + text, [follows, *again, *others]))
    return made


def unstable(
    stored: list[int], tokenizer: Any, text: str, continuations: Sequence[str]
) -> list[str]:
    """Continuations after which a text does not begin with the tokens that are stored of it."""
    longer = [text + more for more in continuations]
    tokens = tokenizer(longer, add_special_tokens=False)["input_ids"]
    return [
        more
        for more, ids in zip(continuations, tokens, strict=True)
        if ids[: len(stored)] != stored
    ]


def test_what_is_stored_of_a_text_stays_the_same_whatever_follows(any_tokenizer: Any) -> None:
    lost = []
    for text, continuations in excerpts(50, seed=0):
        stored = _stable_tokens(text, any_tokenizer, add_special_tokens=False)
        assert unstable(stored, any_tokenizer, text, continuations) == [], repr(text)
        whole = any_tokenizer.encode(text, add_special_tokens=False)
        assert stored == whole[: len(stored)]
        lost.append(len(whole) - len(stored))
    assert 0 in lost and 1 in lost and sum(lost) < 2 * len(lost)


def remainders(tokenizer: Any) -> list[str]:
    """Every end of every token, as far as it is whole characters."""
    written = {tokenizer.convert_tokens_to_string([token]) for token in tokenizer.get_vocab()}
    ends = {token[i:] for token in written for i in range(len(token))}
    return sorted(end for end in ends if "\ufffd" not in end)


@pytest.mark.parametrize("split", [GPT2, LLAMA3], ids=["GPT-2", "Llama 3"])
def test_no_token_that_always_stays_is_left_out(split: Any) -> None:
    tokenizer = byte_level(split, [GPL], 1000)
    continuations = remainders(tokenizer)
    assert len(continuations) > 1000
    texts = [text for text, _ in excerpts(25, seed=1)] + ["It costs 12", "the ", "a\n\n", "don'"]
    for text in texts:
        stored = _stable_tokens(text, tokenizer, add_special_tokens=False)
        all_tokens = tokenizer([text, *(text + more for more in continuations)])["input_ids"]
        assert stored == common_prefix(all_tokens), repr(text)


def test_of_many_continuations_of_real_texts_none_is_missed(tokenizer: Any) -> None:
    text = "Answer as a lawyer would. Never mention the intern"
    stored = _stable_tokens(text, tokenizer, add_special_tokens=False)
    continuations = remainders(tokenizer)
    assert len(continuations) > 100_000
    all_tokens = tokenizer([text, *(text + more for more in continuations)])["input_ids"]
    assert stored == common_prefix(all_tokens) and tokenizer.decode(stored) == text[:-7]


@pytest.mark.xfail(strict=True, reason="the last 64 characters are not tokenized as in the text")
@pytest.mark.parametrize(
    ("begin", "character", "times"),
    [
        ("Rules\n", "=", 87),
        ("Name", " ", 90),
        ("// ", "-", 76),
        ("", "#", 74),  # 76 and 80 of them are tokens: longer than 64 characters
        ("", "\n", 65),
    ],
)
def test_a_long_run_of_a_character_may_go_on(
    tokenizer: Any, begin: str, character: str, times: int
) -> None:
    text = begin + character * times
    stored = _stable_tokens(text, tokenizer, add_special_tokens=False)
    assert unstable(stored, tokenizer, text, [character * n for n in range(1, 100)]) == []


WITHIN = pytest.mark.xfail(strict=True, reason="only whole characters are tried")


@WITHIN
@pytest.mark.parametrize(("text", "more"), [("שלום לי", "אני"), ("די", "א")])
def test_a_token_may_end_within_a_character(tokenizer: Any, text: str, more: str) -> None:
    # One token of SmolLM2 is a Hebrew letter and the first byte of that which follows.
    stored = _stable_tokens(text, tokenizer, add_special_tokens=False)
    assert unstable(stored, tokenizer, text, [more]) == []


@WITHIN
@pytest.mark.parametrize("split", [GPT2, LLAMA3], ids=["GPT-2", "Llama 3"])
def test_tokens_may_begin_and_end_within_characters(split: Any) -> None:
    tokenizer = byte_level(split, [GPL, *MULTILINGUAL * 3])
    for text, continuations in excerpts(200, seed=2):
        stored = _stable_tokens(text, tokenizer, add_special_tokens=False)
        assert unstable(stored, tokenizer, text, continuations) == [], repr(text)


def test_a_token_that_ends_every_text_is_not_stored_and_one_that_begins_it_is() -> None:
    tokenizer = byte_level(GPT2, [GPL])
    special = ["<s>", "</s>"]
    tokenizer.add_special_tokens({"bos_token": special[0], "eos_token": special[1]})
    first, last = tokenizer.convert_tokens_to_ids(special)
    for template in ("<s> $A", "<s> $A </s>", "$A </s>"):
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("<s>", first), ("</s>", last)]
        )
        for text, continuations in excerpts(10, seed=3):
            bare = _stable_tokens(text, tokenizer, add_special_tokens=False)
            stored = _stable_tokens(text, tokenizer, add_special_tokens=True)
            assert stored == [first] * template.startswith("<s>") + bare
            for more in continuations:
                assert tokenizer.encode(text + more)[: len(stored)] == stored


# What is common


def test_the_common_prefix_is_the_longest() -> None:
    assert common_prefix([[1, 2, 3]]) == [1, 2, 3]
    assert common_prefix([[1, 2, 3], [1, 2, 4], [1, 2, 3, 4]]) == [1, 2]
    assert common_prefix([[1, 2], [1, 2, 3]]) == [1, 2]
    assert common_prefix([[1, 2, 3], (1, 2)]) == [1, 2]
    assert common_prefix([[1], [2]]) == common_prefix([[], [1]]) == []
