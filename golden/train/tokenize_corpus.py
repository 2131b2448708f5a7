"""Step 2: a byte-level BPE of 4,096 tokens, and the corpus in tokens.

The merges are learned on equal shares of the five domains. Every document starts with ``<|endoftext|>``, so the token
is separator, start and end at once.

Output: ``tokenizer.json`` and ``tokens.npz``: ``train`` uint16, all training documents one after another; ``starts``,
one number per source and the end; ``sources``, their names; ``heldout_DOMAIN`` uint16 with ``heldout_DOMAIN_starts``.
"""

from collections import defaultdict
from pathlib import Path

import corpus
import numpy as np
from sources import DOMAINS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 4096
END_OF_TEXT = "<|endoftext|>"
BYTES_PER_DOMAIN = 5_000_000  # of the text that the merges are learned on


def learn(folder: Path) -> Tokenizer:
    """Learn the merges on the first `BYTES_PER_DOMAIN` of each domain, in files taken evenly from all of it."""
    texts: dict[str, list[str]] = defaultdict(list)
    for document in corpus.read(folder / "train.jsonl"):
        texts[document["domain"]].append(document["text"])
    sample: list[str] = []
    for domain in DOMAINS:
        total = sum(map(len, texts[domain]))
        step = max(1, round(total / BYTES_PER_DOMAIN))
        sample += texts[domain][::step]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    """Tokens of each text, after the separator that every document starts with."""
    separator = tokenizer.token_to_id(END_OF_TEXT)
    encodings = tokenizer.encode_batch_fast(texts)
    return [np.array([separator, *encoding.ids], dtype=np.uint16) for encoding in encodings]


def build(folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokens.npz`` beside the corpus in `folder`."""
    tokenizer = learn(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    by_source: dict[str, list[str]] = defaultdict(list)
    for document in corpus.read(folder / "train.jsonl"):
        by_source[document["source"]].append(document["text"])
    arrays: dict[str, np.ndarray] = {}
    parts, starts = [], [0]
    for source, texts in by_source.items():
        tokens = np.concatenate(encode(tokenizer, texts))
        parts.append(tokens)
        starts.append(starts[-1] + tokens.size)
        size = sum(len(text.encode()) for text in texts)
        print(f"  {source:16s} {tokens.size:11,d} tokens, {size / tokens.size:.2f} bytes each")
    arrays |= {"train": np.concatenate(parts), "starts": np.array(starts), "sources": np.array(list(by_source))}
    for domain in DOMAINS:
        held_out = [d["text"] for d in corpus.read(folder / "heldout.jsonl") if d["domain"] == domain]
        tokens = encode(tokenizer, held_out)
        arrays[f"heldout_{domain}"] = np.concatenate(tokens)
        arrays[f"heldout_{domain}_starts"] = np.cumsum([0] + [t.size for t in tokens])
        arrays[f"heldout_{domain}_bytes"] = np.array([len(text.encode()) for text in held_out])
    np.savez_compressed(folder / "tokens.npz", **arrays)
    print(f"  {arrays['train'].size:,d} tokens to train on")
