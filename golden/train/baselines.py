"""Step 4: what the held-out bytes cost without a neural network, in bits per byte.

``xz``: each domain's held-out text, compressed by itself (preset 9, extreme). ``five_gram``: a byte-level 5-gram with
Witten-Bell interpolation down to the uniform distribution, counted over the training text of all domains.
"""

import json
import lzma
from collections.abc import Iterator
from pathlib import Path

import corpus
import numpy as np
from sources import DOMAINS

SEPARATOR = b"\0"  # occurs in no document
ORDER = 5
XZ_PRESET = 9 | lzma.PRESET_EXTREME


def joined(path: Path, domain: str | None = None) -> np.ndarray:
    """The bytes of all documents of a ``.jsonl`` file, a separator before each."""
    texts = (d["text"] for d in corpus.read(path) if domain in (None, d["domain"]))
    return np.frombuffer(b"".join(SEPARATOR + text.encode() for text in texts), dtype=np.uint8)


def grams(data: np.ndarray, n: int) -> np.ndarray:
    """The n-gram that ends at each byte from the n-th on, as one integer, its last byte lowest."""
    keys = np.zeros(data.size - n + 1, dtype=np.uint64)
    for i in range(n):
        keys = (keys << np.uint64(8)) | data[i : data.size - n + 1 + i]
    return keys


def look_up(keys: np.ndarray, counts: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The count of each wanted key, 0 where it is unknown; `keys` sorted."""
    where = np.searchsorted(keys, wanted).clip(max=keys.size - 1)
    return np.where(keys[where] == wanted, counts[where], 0)


def tables(data: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """For n = 1…5: n-grams and their counts; contexts, their counts, and their numbers of distinct next bytes."""
    for n in range(1, ORDER + 1):
        keys, counts = np.unique(grams(data, n), return_counts=True)
        contexts, first = np.unique(keys >> np.uint64(8), return_index=True)
        followed = np.add.reduceat(counts, first)
        distinct = np.diff(np.append(first, keys.size))
        yield keys, counts, contexts, followed, distinct


def five_gram(train: np.ndarray, texts: dict[str, np.ndarray]) -> dict[str, float]:
    """Bits per byte of each text, its separators not counted."""
    probability = {name: np.full(text.size, 1 / 256) for name, text in texts.items()}
    for n, (keys, counts, contexts, followed, distinct) in enumerate(tables(train), start=1):
        for name, text in texts.items():
            wanted = grams(text, n)
            context = wanted >> np.uint64(8)
            seen, kinds = look_up(contexts, followed, context), look_up(contexts, distinct, context)
            shorter = probability[name][n - 1 :]
            mixed = (look_up(keys, counts, wanted) + kinds * shorter) / np.maximum(seen + kinds, 1)
            probability[name][n - 1 :] = np.where(seen > 0, mixed, shorter)
    return {name: float(-np.log2(probability[name][text != 0]).mean()) for name, text in texts.items()}


def build(folder: Path) -> None:
    """Write ``baselines.json``."""
    texts = {domain: joined(folder / "heldout.jsonl", domain) for domain in DOMAINS}
    plain = {domain: text[text != 0].tobytes() for domain, text in texts.items()}
    result = {
        "xz": {domain: 8 * len(lzma.compress(text, preset=XZ_PRESET)) / len(text) for domain, text in plain.items()},
        "five_gram": five_gram(joined(folder / "train.jsonl"), texts),
    }
    (folder / "baselines.json").write_text(json.dumps(result, indent=1) + "\n")
    for domain in DOMAINS:
        print(f"  {domain:12s} xz {result['xz'][domain]:.3f}   5-gram {result['five_gram'][domain]:.3f}")
