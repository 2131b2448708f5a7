"""Bundles made to hurt: each gets one line that names the file and the tensor, before anything is read or allocated."""

import json
import os
import pickle
import random
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_bundle import CONFIG, EXPERT, GATE, files_in, packed_weights

from kdtree_nb.bundle import Bundle, BundleError, write_bundle

Header = dict[str, Any]
NORM = "model.norm"
KV_B = "model.layers.0.self_attn.kv_b_proj"


@pytest.fixture(scope="module")
def genuine(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_bundle(tmp_path_factory.mktemp("genuine") / "m.kdtr", CONFIG, packed_weights()).read_bytes()


def split(raw: bytes) -> tuple[Header, bytes]:
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def join(header: Header | bytes, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def seal(header: Header) -> None:
    """Give the metadata the checksums that its tensors, config and tokenizer need: an attacker can do that too."""
    metadata = header["__metadata__"]
    checksums = json.loads(metadata["checksums"])
    sealed = sha256(json.dumps([metadata.get("config"), metadata.get("tokenizer")]).encode()).hexdigest()
    checksums = {name: checksums.get(name, f"sha256:{'0' * 64}") for name in header}
    metadata["checksums"] = json.dumps({**checksums, "__metadata__": f"sha256:{sealed}"})


def assert_refused(path: Path, *fragments: str, file: str | None = None) -> None:
    with pytest.raises(BundleError) as caught:
        Bundle.open(path).verify()
    message = str(caught.value)
    assert message.isprintable(), f"not one clean line: {message!r}"
    assert len(message) <= 1001
    for fragment in (file or path.name, *fragments):
        assert fragment in message


def renamed(header: Header, old: str, new: str) -> None:
    header[new] = header.pop(old)


# --- Bytes that are no safetensors file ------------------------------------------------------------------------------


def cut(count: int) -> Callable[[bytes], bytes]:
    return lambda raw: raw[:count]


RAW: dict[str, tuple[Callable[[bytes], bytes], tuple[str, ...]]] = {
    "empty": (cut(0), ("0 bytes",)),
    "half a length": (cut(4), ("4 bytes",)),
    "a length and nothing": (cut(8), ("header's length", "truncated?")),
    "half a header": (cut(1000), ("header's length", "1000 bytes", "truncated?")),
    "one byte short": (lambda raw: raw[:-1], ("tensor 'model.norm'", "data_offsets", "truncated?")),
    "half the data": (lambda raw: raw[: -(len(split(raw)[1]) // 2)], ("tensor '", "data_offsets", "truncated?")),
    "one byte too many": (lambda raw: raw + b"\0", ("tensor 'model.norm' ends at byte",)),
    "header longer than the file": (lambda raw: (10**7).to_bytes(8, "little") + raw[8:], ("length 10000000",)),
    "header of 2**64 - 1 bytes": (lambda raw: b"\xff" * 8 + raw[8:], (str(2**64 - 1),)),
    "header of no bytes": (lambda raw: bytes(8) + raw[8:], ("header",)),
    "a pickle": (lambda raw: pickle.dumps({"model.norm": [1.0]}) * 9, ("header's length",)),
    "a zip": (lambda raw: b"PK\x03\x04" + bytes(26) + b"archive/data.pkl", ("header",)),
    "a GGUF file": (lambda raw: b"GGUF\x03\0\0\0" + bytes(64), ("header's length",)),
    "a web page": (lambda raw: b"<!DOCTYPE html><html>404</html>", ("header's length",)),
    "no JSON": (lambda raw: join(b"{not json}", b""), ("JSON",)),
    "no UTF-8": (lambda raw: join(b'{"\xff\xfe": 1}', b""), ("UTF-8",)),
    "a list": (lambda raw: join(b"[]", b""), ("JSON",)),
    "nested a million deep": (lambda raw: join(b'{"a":' + b"[" * 10**6, b""), ("JSON",)),
    "an empty object": (lambda raw: join(b"{}", b""), ("format=None", "'kdtr'")),
    "escape sequences": (lambda raw: join(b'{"\\u001b[2J\\n":{"dtype":"\\u001b[2J\\n"}}', b""), ("tensor",)),
}


@pytest.mark.parametrize("case", RAW)
def test_bytes_that_are_no_bundle(case: str, genuine: bytes, tmp_path: Path) -> None:
    change, fragments = RAW[case]
    path = tmp_path / "m.kdtr"
    path.write_bytes(change(genuine))
    assert_refused(path, *fragments)


def test_every_truncation_is_refused(genuine: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.kdtr"
    for length in sorted({*range(0, len(genuine), 499), *range(len(genuine) - 40, len(genuine))}):
        path.write_bytes(genuine[:length])
        assert_refused(path)


def test_a_pickle_is_not_executed(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
            return os.mkdir, (str(tmp_path / "executed"),)

    for payload in (pickle.dumps(Bomb()), join(pickle.dumps(Bomb(), 0), b""), join(b"{}", pickle.dumps(Bomb()))):
        (tmp_path / "m.kdtr").write_bytes(payload)
        assert_refused(tmp_path / "m.kdtr")
    assert files_in(tmp_path) == ["m.kdtr"]


def test_a_header_above_the_librarys_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "m.kdtr"
    path.write_bytes((2**30).to_bytes(8, "little"))
    with open(path, "r+b") as file:
        file.truncate(2**31)  # a hole
    started = time.perf_counter()
    assert_refused(path, "header too large")
    assert time.perf_counter() - started < 5


def test_a_name_longer_than_any_message(tmp_path: Path) -> None:
    path = tmp_path / "m.kdtr"
    path.write_bytes(join({"x" * 10**6: {"dtype": "Q4", "shape": [1], "data_offsets": [0, 4]}}, b"1234"))
    assert_refused(path, "tensor 'xxxx", "…")


# --- Headers that lie about a tensor ---------------------------------------------------------------------------------


def put(name: str, **fields: object) -> Callable[[Header], None]:
    return lambda header: header[name].update(fields)


def overlap(header: Header) -> None:
    begin, end = header[NORM]["data_offsets"]
    header[NORM].update(shape=[33], data_offsets=[begin - 2, end])


def alias(header: Header) -> None:
    header["lm_head"]["data_offsets"] = header["model.embed_tokens"]["data_offsets"]


def hole(header: Header) -> None:
    begin, end = header[NORM]["data_offsets"]
    header[NORM].update(shape=[31], data_offsets=[begin + 2, end])


DAMAGED: dict[str, tuple[Callable[[Header], None], tuple[str, ...]]] = {
    "overlapping offsets": (overlap, (f"tensor '{NORM}'", "expected a start at")),
    "two tensors in one place": (alias, ("tensor 'lm_head'", "expected a start at")),
    "a hole between tensors": (hole, (f"tensor '{NORM}'", "expected a start at")),
    "offsets past the end": (put(NORM, data_offsets=[0, 10**12]), (f"tensor '{NORM}'", "1000000000000")),
    "offsets backwards": (put(NORM, data_offsets=[64, 0]), (f"tensor '{NORM}'", "[64, 0]")),
    "offsets below zero": (put(NORM, data_offsets=[-8, 56]), (f"tensor '{NORM}'", "[-8, 56]")),
    "offsets of 2**63": (put(NORM, data_offsets=[0, 2**63]), (f"tensor '{NORM}'",)),
    "offsets of 10**4000": (put(NORM, data_offsets=[0, 10**4000]), (f"tensor '{NORM}'",)),
    "one offset": (put(NORM, data_offsets=[0]), (f"tensor '{NORM}'", "data_offsets [0]")),
    "offsets as text": (put(NORM, data_offsets="0-64"), (f"tensor '{NORM}'", "'0-64'")),
    "no offsets": (lambda header: header[NORM].pop("data_offsets"), (f"tensor '{NORM}'", "data_offsets None")),
    "an unknown dtype": (put(NORM, dtype="Q4_K"), (f"tensor '{NORM}'", "dtype 'Q4_K'", "F32, BF16")),
    "a dtype of four kilobytes": (put(NORM, dtype="F" * 4096), (f"tensor '{NORM}'",)),
    "a dtype that is a number": (put(NORM, dtype=16), (f"tensor '{NORM}'", "dtype 16")),
    "more shape than bytes": (put(NORM, shape=[33]), (f"tensor '{NORM}'", "64 bytes for BF16 [33], expected 66")),
    "a shape that overflows": (put(NORM, shape=[2**40, 2**40]), (f"tensor '{NORM}'", str(2**40))),
    "a shape that overflows to the right size": (put(NORM, shape=[2**62, 2**63 - 1]), (f"tensor '{NORM}'",)),
    "a shape below zero": (put(NORM, shape=[-32]), (f"tensor '{NORM}'", "shape [-32]")),
    "a shape of a thousand sizes": (put(NORM, shape=[2**60] * 1000), (f"tensor '{NORM}'", "shape")),
    "a fractional shape": (put(NORM, shape=[32.0]), (f"tensor '{NORM}'", "shape [32.0]")),
    "a description that is a list": (lambda header: header.update({NORM: [1]}), (f"tensor '{NORM}'", "list")),
    "metadata that is a number": (lambda header: header["__metadata__"].update(version=1), ("expected a string",)),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_header_that_lies_about_bytes(case: str, genuine: bytes, tmp_path: Path) -> None:
    change, fragments = DAMAGED[case]
    header, data = split(genuine)
    change(header)
    (tmp_path / "m.kdtr").write_bytes(join(header, data))
    assert_refused(tmp_path / "m.kdtr", *fragments)


# --- Valid safetensors files that are no bundle ----------------------------------------------------------------------


def metadata(**fields: str | None) -> Callable[[Header], None]:
    def change(header: Header) -> None:
        for name, value in fields.items():
            if value is None:
                del header["__metadata__"][name]
            else:
                header["__metadata__"][name] = value

    return change


def config(**fields: object) -> Callable[[Header], None]:
    def change(header: Header) -> None:
        hf = json.loads(header["__metadata__"]["config"])
        header["__metadata__"]["config"] = json.dumps({**hf, **fields})

    return change


def rename(old: str, new: str) -> Callable[[Header], None]:
    return lambda header: renamed(header, old, new)


def both(*changes: Callable[[Header], None]) -> Callable[[Header], None]:
    return lambda header: [change(header) for change in changes] and None


SEALED: dict[str, tuple[Callable[[Header], None], tuple[str, ...]]] = {
    "no metadata": (lambda header: header.pop("__metadata__"), ("format=None, expected 'kdtr'",)),
    "no format": (metadata(format=None), ("format=None, expected 'kdtr'",)),
    "another format": (metadata(format="pt"), ("format='pt', expected 'kdtr'",)),
    "an unknown version": (metadata(version="2"), ("version='2', expected '1'",)),
    "a version with a line break": (metadata(version="1\n\x1b[31m"), (r"version='1\n\x1b[31m', expected '1'",)),
    "no version": (metadata(version=None), ("version=None, expected '1'",)),
    "no config": (metadata(config=None), ("metadata config is not valid JSON",)),
    "a config that is no JSON": (metadata(config="{"), ("metadata config is not valid JSON",)),
    "a config that is a list": (metadata(config="[]"), ("metadata config is a JSON list, expected an object",)),
    "a config nested deep": (metadata(config="[" * 10**5), ("metadata config is not valid JSON",)),
    "a config of two megabytes": (metadata(config=json.dumps("x" * 2**21)), ("metadata config has", "at most")),
    "a config with a number of 5,000 digits": (metadata(config="1" * 5000), ("metadata config is not valid JSON",)),
    "a config for another architecture": (config(model_type="llama"), ("model_type='llama', expected one of",)),
    "a config without a size": (metadata(config='{"model_type": "deepseek_v3"}'), ("config: missing vocab_size",)),
    "a config of the wrong type": (config(rope_theta=[]), ("config: rope_theta=[], expected",)),
    "a config with NaN": (config(rms_norm_eps=float("nan")), ("config: rms_norm_eps=nan, expected",)),
    "a config of other sizes": (config(vocab_size=49), ("'model.embed_tokens' is BF16 [48, 32]", "[49, 32]")),
    "a config of 2**31 - 1 layers": (config(num_hidden_layers=2**31 - 1), ("tensors, expected",)),
    "a config of 2**31 - 1 experts": (config(n_routed_experts=2**31 - 1), ("expected at most 1024",)),
    "a config of 2**31 - 1 dense layers": (
        config(num_hidden_layers=2**31 - 1, first_k_dense_replace=2**31 - 1),
        ("tensors, expected",),
    ),
    "a missing weight": (rename(NORM, "model.norm2"), (f"tensor '{NORM}' is missing", "[32]")),
    "a name with the suffix of a checkpoint": (rename(NORM, f"{NORM}.weight"), (f"tensor '{NORM}' is missing",)),
    "a missing .sc": (
        rename(f"{GATE}.sc", "x.sc"),
        (f"tensor '{GATE}.qw', expected only '{GATE}'", f" with '{GATE}.sc'"),
    ),
    "a missing .qw": (rename(f"{EXPERT}.qw", "x.qw"), (f"tensor '{EXPERT}.sc', expected only '{EXPERT}'",)),
    "packed attention": (rename(KV_B, f"{KV_B}.qw"), (f"tensor '{KV_B}.qw', expected only '{KV_B}'", "never packed")),
    "a packed weight that is never packed": (
        both(rename("model.embed_tokens", "model.embed_tokens.qw"), rename(NORM, "model.embed_tokens.sc")),
        ("tensor 'model.embed_tokens.qw' and 'model.embed_tokens.sc', expected", "[48, 32], never packed"),
    ),
    "int32 instead of a float": (put("lm_head", dtype="I32", shape=[24, 32]), ("tensor 'lm_head' is I32", "F32")),
    "a float instead of int32": (put(f"{GATE}.qw", dtype="F32"), (f"tensor '{GATE}.qw' is F32", "expected I32")),
    "integer scales": (put(f"{GATE}.sc", dtype="I32", shape=[32, 1]), (f"tensor '{GATE}.sc' is I32", "expected F32")),
    "float64": (put("lm_head", dtype="F64", shape=[12, 32]), ("tensor 'lm_head': dtype 'F64', expected one of",)),
    "four-bit floats": (put("lm_head", dtype="F4", shape=[96, 64]), ("tensor 'lm_head': dtype 'F4', expected",)),
    "a transposed weight": (put("lm_head", shape=[32, 48]), ("tensor 'lm_head' is BF16 [32, 48]", "[48, 32]")),
    "a weight with a third size": (put("lm_head", shape=[48, 32, 1]), ("tensor 'lm_head' is BF16 [48, 32, 1]",)),
    "a scalar": (put("lm_head", shape=[]), ("tensor 'lm_head'",)),
    "scales of another grouping": (put(f"{GATE}.sc", shape=[32, 2]), (f"'{GATE}.sc' is BF16 [32, 2]", "[64, 1]")),
    "words of another width": (put(f"{GATE}.qw", shape=[32, 8]), (f"'{GATE}.qw' is I32 [32, 8]", "[64, 4]")),
    "no checksums": (metadata(checksums=None), ("metadata checksums is not valid JSON",)),
    "checksums that are a list": (metadata(checksums="[]"), ("metadata checksums is a JSON list",)),
    "checksums of a megabyte": (metadata(checksums="[" + "[]," * 10**6), ("metadata checksums has", "at most")),
    "checksums for nothing": (metadata(checksums="{}"), ("tensor '__metadata__': expected a checksum",)),
    "a checksum twice": (metadata(checksums='{"a": "", "a": ""}'), ("'a' appears twice",)),
    "a tokenizer above": (metadata(tokenizer="../tokenizer.json"), ("tokenizer '../tokenizer.json' is not a plain",)),
    "a tokenizer below": (metadata(tokenizer="sub/tokenizer.json"), ("tokenizer 'sub/tokenizer.json' is not",)),
    "an absolute tokenizer": (metadata(tokenizer="/etc/passwd"), ("tokenizer '/etc/passwd' is not a plain",)),
    "a tokenizer on a drive": (metadata(tokenizer="C:tokenizer.json"), ("tokenizer 'C:tokenizer.json' is not",)),
    "a tokenizer with backslashes": (metadata(tokenizer="..\\tokenizer.json"), ("tokenizer '..\\\\tokenizer.json'",)),
    "a tokenizer with a NUL": (metadata(tokenizer="a\0b"), (r"tokenizer 'a\x00b' is not a plain",)),
    "a tokenizer without a name": (metadata(tokenizer=""), ("tokenizer '' is not a plain",)),
    "a tokenizer that is the folder": (metadata(tokenizer="."), ("tokenizer '.' is not a plain",)),
    "a tokenizer of 300 letters": (metadata(tokenizer="t" * 300), ("tokenizer 'ttt", "is not a plain")),
    "a tokenizer that leads elsewhere": (metadata(tokenizer="link.json"), ("tokenizer 'link.json' leads outside",)),
}


@pytest.mark.parametrize("case", SEALED)
def test_a_valid_file_that_is_no_bundle(case: str, genuine: bytes, tmp_path: Path) -> None:
    change, fragments = SEALED[case]
    header, data = split(genuine)
    change(header)
    if "checksum" not in case and "no metadata" not in case:
        seal(header)
    (tmp_path / "link.json").symlink_to("/etc/passwd")
    (tmp_path / "m.kdtr").write_bytes(join(header, data))
    started = time.perf_counter()
    assert_refused(tmp_path / "m.kdtr", *fragments)
    assert time.perf_counter() - started < 5


def test_surplus_and_doubled_tensors(genuine: bytes, tmp_path: Path) -> None:
    for extra, shape, message in (
        ("model.layers.7.mlp.gate", [4, 32], "tensor 'model.layers.7.mlp.gate' is no weight of the config"),
        ("payload", [128], "tensor 'payload' is no weight of the config"),
        (GATE, [64, 2], f"tensor '{GATE}' and '{GATE}.qw' and '{GATE}.sc', expected only '{GATE}' [64, 32] or"),
    ):
        header, data = split(genuine)
        header[extra] = {"dtype": "BF16", "shape": shape, "data_offsets": [len(data), len(data) + 256]}
        seal(header)
        (tmp_path / "m.kdtr").write_bytes(join(header, data + bytes(256)))
        assert_refused(tmp_path / "m.kdtr", message)


def test_a_changed_config_needs_a_changed_checksum(genuine: bytes, tmp_path: Path) -> None:
    for change in (config(routed_scaling_factor=3.5), metadata(tokenizer="other.json")):
        header, data = split(genuine)
        change(header)
        (tmp_path / "m.kdtr").write_bytes(join(header, data))
        assert_refused(tmp_path / "m.kdtr", "metadata config and tokenizer: not as written", "checksum is 'sha256:")


@pytest.mark.parametrize("value", [None, 7, "", "md5:00", ["sha256"], "sha256:" + "0" * 64])
def test_a_wrong_checksum_names_its_tensor(value: object, genuine: bytes, tmp_path: Path) -> None:
    header, data = split(genuine)
    checksums = json.loads(header["__metadata__"]["checksums"])
    header["__metadata__"]["checksums"] = json.dumps({**checksums, "lm_head": value})
    (tmp_path / "m.kdtr").write_bytes(join(header, data))
    assert_refused(tmp_path / "m.kdtr", "tensor 'lm_head': checksum sha256:", f"expected {value!r}")
    del checksums["lm_head"]
    header["__metadata__"]["checksums"] = json.dumps(checksums)
    (tmp_path / "m.kdtr").write_bytes(join(header, data))
    assert_refused(tmp_path / "m.kdtr", "tensor 'lm_head': expected a checksum")


def test_group_size_64_is_refused_not_misread(tmp_path: Path) -> None:
    """The shapes of a bundle whose scales cover 64 inputs: half as many scales as the config asks for."""
    packed = packed_weights()
    name = "model.layers.0.mlp.down_proj"  # [32, 64]: two groups of 32, or one of 64
    packed[f"{name}.sc"] = packed[f"{name}.sc"][:, :1]
    with pytest.raises(BundleError, match=rf"tensor '{name}.sc' is BF16 \[32, 1\], expected F32 or .* \[32, 2\]"):
        write_bundle(tmp_path / "m.kdtr", CONFIG, packed)


# --- Things that are not files ---------------------------------------------------------------------------------------


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    assert_refused(tmp_path / "absent.kdtr", "no such file")
    assert_refused(tmp_path / "absent.kdtr.index.json", "no such file")
    (tmp_path / "folder.kdtr.index.json").mkdir()
    (tmp_path / "folder.kdtr.index.json" / "m.kdtr.index.json").mkdir()
    assert_refused(tmp_path / "folder.kdtr.index.json", "a folder, expected a file", file="m.kdtr.index.json")
    (tmp_path / "endless.kdtr").symlink_to("/dev/zero")
    assert_refused(tmp_path / "endless.kdtr", "no such file")
    os.mkfifo(tmp_path / "pipe.kdtr")  # opening it would wait for ever
    assert_refused(tmp_path / "pipe.kdtr", "no such file")
    (tmp_path / "pipe.kdtr").unlink()
    (tmp_path / "loop.kdtr").symlink_to("loop.kdtr")
    assert_refused(tmp_path / "loop.kdtr", "no such file")


# --- Indexes ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """An index in a folder of its own, with a bundle outside of that folder which no index may reach."""
    (tmp_path / "inside").mkdir()
    write_bundle(tmp_path / "outside.kdtr", CONFIG, packed_weights())
    return write_bundle(tmp_path / "inside" / "m.kdtr", CONFIG, packed_weights(), max_shard_bytes=6000)


@pytest.mark.parametrize(
    ("shard", "fragment"),
    [
        ("../outside.kdtr", "is not a plain file name"),
        ("..\\outside.kdtr", "is not a plain file name"),
        ("sub/../../outside.kdtr", "is not a plain file name"),
        ("./m-00001-of-00003.kdtr", "is not a plain file name"),
        ("..kdtr", "is not a plain file name"),
        ("ABSOLUTE", "is not a plain file name"),
        ("C:outside.kdtr", "is not a plain file name"),
        ("file:outside.kdtr", "is not a plain file name"),
        ("a\nb.kdtr", "is not a plain file name"),
        ("a\0b.kdtr", "is not a plain file name"),
        ("\ud800.kdtr", "is not a plain file name"),
        (f"{'x' * 300}.kdtr", "is not a plain file name"),
        ("link.kdtr", "leads outside the folder"),
        ("absent.kdtr", "does not exist"),
        ("loop.kdtr", "does not exist"),
        ("pipe.kdtr", "does not exist"),
        ("folder.kdtr", "does not exist"),
        ("tokenizer.json", "expected the name of a .kdtr file"),
        ("", "expected the name of a .kdtr file"),
        (None, "expected the name of a .kdtr file"),
        (7, "expected the name of a .kdtr file"),
        (["m-00001-of-00003.kdtr"], "expected the name of a .kdtr file"),
    ],
)
def test_an_index_that_names_a_file_elsewhere(shard: object, fragment: str, sharded: Path, tmp_path: Path) -> None:
    folder = sharded.parent
    (folder / "link.kdtr").symlink_to(tmp_path / "outside.kdtr")
    (folder / "loop.kdtr").symlink_to("loop.kdtr")
    (folder / "folder.kdtr").mkdir()
    os.mkfifo(folder / "pipe.kdtr")
    shard = str(tmp_path / "outside.kdtr") if shard == "ABSOLUTE" else shard
    index = json.loads(sharded.read_text())
    index["weight_map"]["lm_head"] = shard
    sharded.write_text(json.dumps(index))
    assert_refused(sharded, "tensor 'lm_head'", repr(shard)[:200], fragment)


def test_a_symlink_within_the_folder_is_fine(sharded: Path) -> None:
    shard = next(sharded.parent.glob("*.kdtr"))
    shard.rename(sharded.parent / "blob")
    shard.symlink_to("blob")
    Bundle.open(sharded).verify()


INDEXES: dict[str, tuple[Callable[[Header], object], tuple[str, ...]]] = {
    "no JSON": (lambda index: b"{", ("the index is not valid JSON",)),
    "no UTF-8": (lambda index: b'{"\xff": 1}', ("the index is not valid JSON",)),
    "nested deep": (lambda index: b"[" * 10**6, ("the index is not valid JSON",)),
    "a list": (lambda index: [], ("the index is a JSON list",)),
    "no weight_map": (lambda index: {"metadata": {}}, ("weight_map is missing",)),
    "an empty weight_map": (lambda index: {"weight_map": {}}, ("weight_map is missing",)),
    "weight_map as a list": (lambda index: {"weight_map": ["m.kdtr"]}, ("weight_map is missing",)),
    "a name twice": (
        lambda index: json.dumps(index).replace('"model.norm"', '"lm_head"').encode(),
        ("'lm_head' appears twice",),
    ),
}


@pytest.mark.parametrize("case", INDEXES)
def test_an_index_that_is_none(case: str, sharded: Path) -> None:
    change, fragments = INDEXES[case]
    changed = change(json.loads(sharded.read_text()))
    sharded.write_bytes(changed if isinstance(changed, bytes) else json.dumps(changed).encode())
    assert_refused(sharded, *fragments)


def test_an_index_of_gigabytes_is_not_read(sharded: Path) -> None:
    with open(sharded, "r+b") as file:
        file.truncate(2**33)
    assert_refused(sharded, f"has {2**33} bytes, expected at most {2**26}")


def test_an_index_that_disagrees_with_its_shards(sharded: Path) -> None:
    original = json.loads(sharded.read_text())["weight_map"]
    first, last = original["model.embed_tokens"], original["lm_head"]
    for change, file, fragments in (
        ({"lm_head": first}, last, ("tensor 'lm_head' is here", f"has it in '{first}'")),
        ({"lm_head": None}, last, ("tensor 'lm_head' is here", "has it in 'nowhere'")),
        ({"more": first}, first, ("tensor 'more' is missing", sharded.name)),
    ):
        weight_map = {name: shard for name, shard in {**original, **change}.items() if shard is not None}
        sharded.write_text(json.dumps({"weight_map": weight_map}))
        assert_refused(sharded, *fragments, file=file)


def test_shards_that_disagree(sharded: Path) -> None:
    weight_map = json.loads(sharded.read_text())["weight_map"]
    shard = sharded.with_name(weight_map["lm_head"])
    good = shard.read_bytes()
    for change in (config(routed_scaling_factor=3.5), metadata(tokenizer="other.json")):
        header, data = split(good)
        change(header)
        seal(header)
        shard.write_bytes(join(header, data))
        assert_refused(sharded, "config or tokenizer differ", file=shard.name)

    header, data = split(good)  # the same tensor in two shards
    header["model.embed_tokens"] = {"dtype": "BF16", "shape": [1], "data_offsets": [len(data), len(data) + 2]}
    seal(header)
    shard.write_bytes(join(header, data + b"12"))
    assert_refused(sharded, "tensor 'model.embed_tokens' is here", file=shard.name)

    shard.write_bytes(good[:-1])
    assert_refused(sharded, "tensor '", "truncated?", file=shard.name)
    shard.unlink()
    assert_refused(sharded, f"shard '{shard.name}' does not exist")


def test_a_shard_alone_is_no_bundle(sharded: Path) -> None:
    shard = min(sharded.parent.glob("*.kdtr"))
    assert_refused(shard, "a shard opens by its index")


# --- Anything at all -------------------------------------------------------------------------------------------------


@st.composite
def edits(draw: st.DrawFn) -> list[tuple[str, float, int, int]]:
    """A few edits: what, where (a fraction of the header or the file), a byte, a length."""
    kinds = st.sampled_from(["set", "flip", "insert", "delete", "copy", "cut", "length"])
    one = st.tuples(kinds, st.floats(0, 1, exclude_max=True), st.integers(0, 255), st.integers(1, 40))
    return draw(st.lists(one, min_size=1, max_size=4))


def edited(raw: bytes, changes: list[tuple[str, float, int, int]], header_only: bool) -> bytes:
    result = bytearray(raw)
    for kind, where, byte, length in changes:
        end = min(len(result), 8 + int.from_bytes(raw[:8], "little")) if header_only else len(result)
        at = int(where * end)
        if kind == "set" and result:
            result[at] = byte
        elif kind == "flip" and result:
            result[at] ^= 1 << byte % 8
        elif kind == "insert":
            result[at:at] = bytes([byte]) * length
        elif kind == "delete":
            del result[at : at + length]
        elif kind == "copy":
            result[at : at + length] = result[byte : byte + length]
        elif kind == "cut":
            del result[at:]
        elif kind == "length":
            result[:8] = (int.from_bytes(result[:8], "little") + length - 20 & (2**64 - 1)).to_bytes(8, "little")
    return bytes(result)


def refusal(path: Path) -> str | None:
    """What is said against a bundle, None where it opens and its sums agree; any other exception is a bug."""
    try:
        Bundle.open(path).verify()
    except BundleError as error:
        return str(error)
    return None


def assert_refused_or_genuine(path: Path) -> None:
    """A damaged bundle is refused with one clean line, or the damage changed nothing that it says."""
    if message := refusal(path):
        assert message.isprintable()
        return
    bundle = Bundle.open(path)
    assert (bundle.config, bundle.tokenizer) == (CONFIG, None)
    for name, expected in packed_weights().items():
        assert bundle[name].tobytes() == expected.tobytes()


@settings(max_examples=200, deadline=None)
@given(changes=edits(), header_only=st.booleans())
def test_mutated_bytes_give_clean_errors(
    changes: list[tuple[str, float, int, int]],
    header_only: bool,
    genuine: bytes,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.getbasetemp() / "mutated.kdtr"
    path.write_bytes(edited(genuine, changes, header_only))
    assert_refused_or_genuine(path)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([2**31, 2**63, 2**64, "F32", "I32", "..", "/"]),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=4), children, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(value=json_values, seed=st.integers(0, 2**32), sealed=st.booleans())
def test_any_json_in_any_place_gives_clean_errors(
    value: object, seed: int, sealed: bool, genuine: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """One value somewhere in the header or in the config becomes another; the checksums are made to agree."""
    choose = random.Random(seed)
    header, data = split(genuine)
    hf = json.loads(header["__metadata__"]["config"])
    parent: Any = header
    place = choose.choice(sorted(header))
    if place == "__metadata__" and choose.random() < 0.7:
        parent, place = hf, choose.choice(sorted(hf))
    while isinstance(parent[place], dict | list) and choose.random() < 0.8:
        parent = parent[place]
        place = choose.choice(sorted(parent)) if isinstance(parent, dict) else choose.randrange(len(parent))
    parent[place] = value
    if place != "__metadata__" and parent is not header["__metadata__"]:  # else there is nothing left to seal
        header["__metadata__"]["config"] = json.dumps(hf)
        if sealed:
            seal(header)
    path = tmp_path_factory.getbasetemp() / "any.kdtr"
    path.write_bytes(join(header, data))
    assert (refusal(path) or "it is still a bundle").isprintable()


@settings(max_examples=100, deadline=None)
@given(changes=edits())
def test_mutated_indexes_give_clean_errors(
    changes: list[tuple[str, float, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "sharded"
    if not folder.exists():
        folder.mkdir()
        (folder / "index").write_bytes(
            write_bundle(folder / "m.kdtr", CONFIG, packed_weights(), max_shard_bytes=6000).read_bytes()
        )
    index = folder / "m.kdtr.index.json"
    index.write_bytes(edited((folder / "index").read_bytes(), changes, header_only=False))
    assert_refused_or_genuine(index)


def test_bit_flips_in_data_pass_open_and_are_found(genuine: bytes, tmp_path: Path) -> None:
    begin = 8 + int.from_bytes(genuine[:8], "little")
    path = tmp_path / "m.kdtr"
    for bit in np.random.default_rng(0).integers(begin * 8, len(genuine) * 8, size=50):
        flipped = bytearray(genuine)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        bundle = Bundle.open(path)
        with pytest.raises(BundleError, match=r"m.kdtr: tensor '.*': checksum sha256:"):
            bundle.verify()
