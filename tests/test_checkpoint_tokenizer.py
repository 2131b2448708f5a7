"""Kimi's tiktoken.model as a tokenizer.json: the same tokens as the tiktoken library gives."""

import base64
import json
from pathlib import Path

import pytest
from builders import random_weights, tiny_config
from checkpoints import float_tensors, write_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from kdtree_nb.bundle import Bundle, BundleError
from kdtree_nb.checkpoint import convert
from kdtree_nb.checkpoint.tokenizer import KIMI_PATTERN, RESERVED_TOKENS, kimi_tokenizer
from kdtree_nb.engine import Engine

ROOT = Path(__file__).parents[1]
CJK = "漢字かな交じり文 中文分词测试，你好世界。你好，世界！한국어 текст ΑΒΓ αβγ ǅ éÀ naïve "
TEXTS = [
    "",
    " ",
    "Hello, world! It's 12345 o'clock; we'LL see.\r\n\r\n\tEnd  ",
    CJK,
    "mixed中文and英文HTTPServer2Go",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "<|im_user|>user<|im_middle|>hi<|im_end|>",
    "👩‍👩‍👧 \u200b\u00a0x\u3000y e\u0301",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary learnt from this repository's prose, in tiktoken's format, with two named special tokens."""
    learnt = Tokenizer(models.BPE())
    learnt.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md")]
    learnt.train_from_iterator([*texts, CJK * 20, "aaaa aaaaaaa " * 50], trainer)
    byte_of = dict(zip(_characters(), range(256), strict=True))
    ranked = sorted(learnt.get_vocab().items(), key=lambda item: item[1])
    lines = [
        f"{base64.b64encode(bytes(byte_of[c] for c in token)).decode()} {rank}"
        for rank, (token, _) in enumerate(ranked)
    ]
    path = tmp_path_factory.mktemp("kimi")
    (path / "tiktoken.model").write_text("\n".join(lines) + "\n")
    named = {len(lines) + 1: "<|im_user|>", len(lines) + 2: "<|im_end|>"}
    added = {str(number): {"content": text, "special": True} for number, text in named.items()}
    (path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    return path


def _characters() -> list[str]:
    """The library's character for each byte, found out by asking it."""
    ask = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found: dict[int, str] = {}
    for code in (*range(0x800), *range(0x800, 0xD800, 64), *range(0xE000, 0x110000, 64)):  # every byte that UTF-8 has
        found |= dict(zip(chr(code).encode(), ask.pre_tokenize_str(chr(code))[0][0], strict=True))
    unused = iter(sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(found.values())))
    return [found[byte] if byte in found else next(unused) for byte in range(256)]


@pytest.fixture(scope="module")
def both(folder: Path) -> tuple[Tokenizer, object]:
    tiktoken = pytest.importorskip("tiktoken")
    load = pytest.importorskip("tiktoken.load")
    ranks = load.load_tiktoken_bpe(str(folder / "tiktoken.model"))
    added = json.loads((folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    names = {int(number): token["content"] for number, token in added.items()}
    special = {names.get(i, f"<|reserved_token_{i}|>"): i for i in range(len(ranks), len(ranks) + RESERVED_TOKENS)}
    theirs = tiktoken.Encoding("kimi", pat_str=KIMI_PATTERN, mergeable_ranks=ranks, special_tokens=special)
    return kimi_tokenizer(folder), theirs


def assert_same(both: tuple[Tokenizer, object], text: str) -> None:
    ours, theirs = both
    ids = ours.encode(text).ids
    assert ids == theirs.encode(text, allowed_special="all")  # type: ignore[attr-defined]
    assert ours.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_are_tiktokens(both: tuple[Tokenizer, object], text: str) -> None:
    assert_same(both, text)


def test_tokens_of_this_repositorys_prose(both: tuple[Tokenizer, object]) -> None:
    assert_same(both, (ROOT / "README.md").read_text(encoding="utf-8"))


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(max_size=60)
    | st.text("aA b1\n'sé中文!", max_size=40)
    | st.lists(st.sampled_from(CJK.split())).map(" ".join)
)
def test_tokens_of_any_text(both: tuple[Tokenizer, object], text: str) -> None:
    assert_same(both, text)


def test_a_converted_bundle_reads_and_writes_text(folder: Path, tmp_path: Path) -> None:
    size = kimi_tokenizer(folder).get_vocab_size()
    assert size == 1500 + RESERVED_TOKENS
    config = tiny_config(vocab_size=size)
    checkpoint = write_folder(tmp_path / "hf", config.to_hf(), float_tensors(random_weights(config, 0)))
    for name in ("tiktoken.model", "tokenizer_config.json"):
        (checkpoint / name).write_bytes((folder / name).read_bytes())
    path = convert(checkpoint, tmp_path / "out")
    assert Bundle.open(path).tokenizer == "tokenizer.json"
    engine = Engine.load(path, "cpu")
    run = engine.generate("你好 world", "ar", max_new_tokens=3)
    assert engine.tokenizer is not None
    assert run.text == engine.tokenizer.decode(run.tokens)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (b"YQ== 0 1\n", "line 1 is b'YQ== 0 1', expected a token in base 64 and its rank"),
        (b"YQ== 0\n!!! 1\n", "line 2 is b'!!! 1'"),
        (b"YQ== 7\n", "1 tokens have other ranks than 0 to 0"),
        (b"YQ== 0\n", "is no token, expected each of the 256"),
    ],
)
def test_a_malformed_vocabulary(tmp_path: Path, lines: bytes, message: str) -> None:
    (tmp_path / "tiktoken.model").write_bytes(lines)
    with pytest.raises(BundleError) as caught:
        kimi_tokenizer(tmp_path)
    assert message in str(caught.value)
