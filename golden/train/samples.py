"""Step 5: held-out prompts, and one short held-out text per domain to measure bits per byte on.

A prompt starts where a reader would start, at the first line of a paragraph, ends before a space or a line end, and is
32 to 96 tokens long; encoding its text gives those tokens again. Its continuation is what the file says next.

Output: ``prompts.json``, the domains in turn, and ``heldout/DOMAIN.txt``, about 24 KB each.
"""

import json
import re
from pathlib import Path

import corpus
from sources import DOMAINS
from tokenizers import Tokenizer

PROMPTS_PER_DOMAIN = 12
LENGTHS = (32, 48, 64, 96)  # tokens at most, in turn
CONTINUATION = 256  # characters
SAMPLE_BYTES = 24_000
APART = 600  # characters between the starts of two prompts


def paragraph_starts(text: str) -> list[int]:
    """Offsets of first lines of paragraphs, `APART` from each other and from the end of the text; 0 is the first."""
    starts = [0]
    for match in re.finditer(r"\n\n+(?= {0,8}[A-Za-z@\d])", text):
        if starts[-1] + APART <= match.end() <= len(text) - APART:
            starts.append(match.end())
    return starts


def prompt_at(tokenizer: Tokenizer, text: str, start: int, length: int) -> str | None:
    """The longest prompt of at most `length` tokens from `start` on that ends before white space, or None."""
    ids = tokenizer.encode(text[start : start + 8 * length]).ids
    for n in range(length, 31, -1):
        prompt = tokenizer.decode(ids[:n], skip_special_tokens=False)
        following = text[start + len(prompt) : start + len(prompt) + 1]
        exact = text.startswith(prompt, start) and tokenizer.encode(prompt).ids == ids[:n]
        if exact and following.isspace() and not prompt[-1].isspace():
            return prompt
    return None


def prompts_of(tokenizer: Tokenizer, documents: list[dict[str, str]]) -> list[dict[str, str]]:
    """`PROMPTS_PER_DOMAIN` prompts, spread evenly over the documents and the paragraphs of each."""
    places = []
    for document in documents:
        starts = paragraph_starts(document["text"])
        parts = min(PROMPTS_PER_DOMAIN, len(starts))
        places += [((2 * part + 1) / parts, document, starts[part * len(starts) // parts]) for part in range(parts)]
    prompts: list[dict[str, str]] = []
    # In turn from every document, from its middle outwards, until there are enough.
    for _, document, start in sorted(places, key=lambda place: abs(place[0] - 1)):
        text, length = document["text"], LENGTHS[len(prompts) % len(LENGTHS)]
        prompt = prompt_at(tokenizer, text, start, length)
        if prompt is not None and len(prompts) < PROMPTS_PER_DOMAIN:
            end = start + len(prompt)
            prompts.append({"domain": document["domain"], "source": document["path"], "text": prompt,
                            "continuation": text[end : end + CONTINUATION]})  # fmt: skip
    return prompts


def sample_of(documents: list[dict[str, str]]) -> str:
    """The documents one after another, cut at the last line that fits into `SAMPLE_BYTES`."""
    whole = "\n".join(document["text"] for document in documents)
    return whole.encode()[:SAMPLE_BYTES].decode(errors="ignore").rpartition("\n")[0] + "\n"


def build(folder: Path) -> None:
    """Write ``prompts.json`` and ``heldout/`` into `folder`."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    (folder / "heldout").mkdir(exist_ok=True)
    by_domain = []
    for domain in DOMAINS:
        documents = [d for d in corpus.read(folder / "heldout.jsonl") if d["domain"] == domain]
        by_domain.append(prompts_of(tokenizer, documents))
        (folder / "heldout" / f"{domain}.txt").write_text(sample_of(documents), encoding="utf-8")
    in_turn = [prompts[i] for i in range(PROMPTS_PER_DOMAIN) for prompts in by_domain if i < len(prompts)]
    (folder / "prompts.json").write_text(json.dumps(in_turn, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"  {len(in_turn)} prompts: " + ", ".join(f"{len(p)} {p[0]['domain']}" for p in by_domain))
