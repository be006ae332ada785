"""Whatever follows a text, its stored tokens stay: with several kinds of tokenizers."""

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

from tests.engine.engine import ROOT, SMOLLM2
from vllm_relay.system_kv.prompts import _stable_tokens, common_prefix

GPL = (ROOT / "benchmarks" / "harness" / "text" / "gpl-3.txt").read_text()
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


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(SMOLLM2)


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
    for text, continuations in excerpts(25, seed=0):
        stored = _stable_tokens(text, any_tokenizer, add_special_tokens=False)
        assert unstable(stored, any_tokenizer, text, continuations) == [], repr(text)
        whole = any_tokenizer.encode(text, add_special_tokens=False)
        assert stored == whole[: len(stored)]
        lost.append(len(whole) - len(stored))
    assert 1 in lost and sum(lost) < 3 * len(lost)


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
        always = common_prefix(all_tokens)
        # at the end of a text in another script a little more is left out, to be safe
        spare = 0 if text.isascii() else 4
        assert stored == always[: len(stored)], repr(text)
        assert len(always) - len(stored) <= spare, repr(text)


def test_of_many_continuations_of_real_texts_none_is_missed(tokenizer: Any) -> None:
    text = "Answer as a lawyer would. Never mention the intern"
    stored = _stable_tokens(text, tokenizer, add_special_tokens=False)
    continuations = remainders(tokenizer)
    assert len(continuations) > 100_000
    all_tokens = tokenizer([text, *(text + more for more in continuations)])["input_ids"]
    assert stored == common_prefix(all_tokens) and tokenizer.decode(stored) == text[:-7]


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


@pytest.mark.parametrize(("text", "more"), [("שלום לי", "אני"), ("די", "א")])
def test_a_token_may_end_within_a_character(tokenizer: Any, text: str, more: str) -> None:
    # One token of SmolLM2 is a Hebrew letter and the first byte of that which follows.
    stored = _stable_tokens(text, tokenizer, add_special_tokens=False)
    assert unstable(stored, tokenizer, text, [more]) == []


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
