"""What turns text into tokens: ``tokenizer.json`` as it is, or made from Kimi's ``tiktoken.model``."""

import base64
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from kdtree_nb.bundle.format import fault
from kdtree_nb.checkpoint.folder import read_json

TOKENIZER, TIKTOKEN = "tokenizer.json", "tiktoken.model"
RESERVED_TOKENS = 256
"""Special tokens of Kimi's vocabulary, behind the ranked ones."""
COMPANIONS = ("tokenizer_config.json", "chat_template.jinja")
"""What ``generate --chat`` reads beside a bundle."""
_LARGEST_FILE = 2**26
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
KIMI_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""How Kimi K2's tokenizer splits a text into words, each of which is then merged from its bytes."""


def bring_tokenizer(source: Path, target: Path) -> str | None:
    """Put a checkpoint's tokenizer into the bundle's folder, whole or not at all.

    Returns
    -------
    str or None
        Its name, None where the checkpoint has neither ``tokenizer.json`` nor ``tiktoken.model``.

    Raises
    ------
    BundleError
        If ``tiktoken.model`` is malformed.
    """
    temporary = target / f".{TOKENIZER}.tmp"
    if (source / TOKENIZER).is_file():
        shutil.copyfile(source / TOKENIZER, temporary)
    elif (source / TIKTOKEN).is_file():
        temporary.write_text(kimi_tokenizer(source).to_str(), encoding="utf-8")
    else:
        return None
    os.replace(temporary, target / TOKENIZER)
    return TOKENIZER


def copy_companions(source: Path, target: Path) -> None:
    """Take along the files that say how a conversation becomes a text."""
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def kimi_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a folder with ``tiktoken.model`` and, for its special tokens, ``tokenizer_config.json``.

    tiktoken merges the neighbours whose union has the lowest rank. The tokenizers library has a list of pairs, so
    each union stands there with all pairs that make it, in the order of ranks.
    """
    ranks = _read_ranks(folder / TIKTOKEN)
    symbols = _symbols()
    written = {token: "".join(symbols[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(left, right) for left, right in pairs if left in ranks and right in ranks]
        merges += [(written[left], written[right]) for left, right in sorted(known, key=lambda p: (ranks[p[0]], p[0]))]
    vocabulary = {written[token]: rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(KIMI_PATTERN), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    names = _special_names(folder)
    special = range(len(ranks), len(ranks) + RESERVED_TOKENS)
    tokenizer.add_special_tokens(
        [AddedToken(names.get(i, f"<|reserved_token_{i}|>"), normalized=False, special=True) for i in special]
    )
    return tokenizer


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Lines of a token in base 64 and its rank; ranks are 0, 1, 2 … and every byte is a token."""
    if path.stat().st_size > _LARGEST_FILE:
        raise fault(path, f"has {path.stat().st_size} bytes, expected at most {_LARGEST_FILE}")
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise fault(path, f"line {number} is {line[:80]!r}, expected a token in base 64 and its rank") from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise fault(path, f"{len(ranks)} tokens have other ranks than 0 to {len(ranks) - 1}")
    if missing := {bytes([byte]) for byte in range(256)} - ranks.keys():
        raise fault(path, f"byte {min(missing)!r} is no token, expected each of the 256")
    return ranks


def _special_names(folder: Path) -> Mapping[int, str]:
    path = folder / "tokenizer_config.json"
    added = read_json(path).get("added_tokens_decoder") if path.is_file() else None
    try:
        return {int(number): str(token["content"]) for number, token in (added or {}).items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise fault(path, "added_tokens_decoder is malformed, expected {id: {content: text}}") from error


def _symbols() -> list[str]:
    """The printable character that stands for each byte in a ``tokenizer.json``: GPT-2's table."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
