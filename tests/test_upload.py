"""From a bundle's files into device memory: how reads are cut, that buffers wait, and that nothing is left to load."""

import ctypes
import os
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from builders import build, tiny_config
from helpers import assert_same_bits
from hypothesis import given
from hypothesis import strategies as st
from ml_dtypes import bfloat16

from kdtree_nb.bundle import Bundle, BundleError
from kdtree_nb.engine.cache import LatentCache
from kdtree_nb.engine.device import Device
from kdtree_nb.engine.model import Model
from kdtree_nb.engine.upload import Piece, reads, upload
from kdtree_nb.engine.weights import Weights
from kdtree_nb.kernels.launch import address_of, emulated

FILES = (Path("a"), Path("b"))


class LateBuffer:
    """Pinned memory whose copies happen at the last moment: when someone waits for them."""

    made: ClassVar[list["LateBuffer"]] = []

    def __init__(self) -> None:
        self.memory = np.zeros(64, np.uint8)
        self.sent: list[tuple[int, int, int]] = []
        self.made.append(self)

    def send(self, at: int, size: int, address: int) -> None:
        self.sent.append((at, size, address))

    def wait(self) -> None:
        for at, size, address in self.sent:
            ctypes.memmove(address, self.memory.ctypes.data + at, size)
        self.sent.clear()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads go to this machine's memory, 64 bytes at a time, through three buffers."""
    monkeypatch.setattr("kdtree_nb.engine.upload.PinnedBuffer", LateBuffer)
    monkeypatch.setattr("kdtree_nb.engine.upload.BUFFER_BYTES", 64)
    monkeypatch.setattr("kdtree_nb.engine.upload.THREADS", 3)
    LateBuffer.made.clear()


@pytest.fixture
def gpu() -> Device:
    """A device that is a GPU to all but its arrays."""
    of_gpu = SimpleNamespace(Device=lambda: SimpleNamespace(synchronize=lambda: None))
    return Device("cuda", SimpleNamespace(**{**vars(np), "cuda": of_gpu}))


# ---- reads -----------------------------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.sampled_from(FILES), st.integers(0, 20), st.integers(0, 3)), max_size=12, unique_by=lambda p: p[:2]
    ),
    st.integers(1, 40),
)
def test_reads_cover_every_byte_once_and_in_order(spans: list[tuple[Path, int, int]], most: int) -> None:
    # Pieces of 0 to 3 units of 5 bytes; of those that overlap, only the first stays.
    taken: set[tuple[Path, int]] = set()
    pieces = []
    for number, (file, unit, length) in enumerate(spans):
        units = {(file, unit + i) for i in range(length)}
        if not units & taken:
            taken |= units
            pieces.append(Piece(file, 5 * unit, 5 * (unit + length), 1000 * number))
    wanted = {(p.file, p.begin + i): p.address + i for p in pieces for i in range(p.end - p.begin)}
    found = reads(pieces, most)
    moved = {(p.file, p.begin + i): p.address + i for read in found for p in read for i in range(p.end - p.begin)}
    assert moved == wanted
    assert sum(p.end - p.begin for read in found for p in read) == len(wanted)
    for read in found:
        assert read[-1].end - read[0].begin <= most
        assert all(a.file == b.file and a.end == b.begin for a, b in pairwise(read))
    for a, b in pairwise(found):  # no read ends where it could have gone on
        joins = (a[-1].file, a[-1].end) == (b[0].file, b[0].begin)
        assert not joins or a[-1].end - a[0].begin == most


def test_what_lies_side_by_side_in_the_file_is_one_read() -> None:
    pieces = [Piece(FILES[0], 10, 20, 500), Piece(FILES[0], 0, 10, 900), Piece(FILES[0], 21, 22, 0)]
    assert reads(pieces, 64) == [[pieces[1], pieces[0]], [pieces[2]]]


# ---- upload ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("late")
def test_a_buffer_is_not_filled_again_before_it_has_been_sent(tmp_path: Path) -> None:
    bundle = Bundle.open(build(tmp_path / "a.kdtr", tiny_config()).path)
    names = sorted(bundle)
    arrays = {name: np.zeros(bundle[name].nbytes, np.uint8) for name in names}
    pieces = []
    for name in names:
        file, begin = bundle.place(name)
        pieces.append(Piece(file, begin, begin + arrays[name].nbytes, address_of(arrays[name])))
    sizes: list[int] = []
    upload(bundle, pieces, sizes.append)
    assert len(LateBuffer.made) == 3
    assert sum(sizes) == bundle.nbytes
    for name in names:
        assert_same_bits(arrays[name], bundle[name].reshape(-1).view(np.uint8))


@pytest.mark.usefixtures("late")
def test_nothing_to_upload(tmp_path: Path) -> None:
    upload(Bundle.open(build(tmp_path / "a.kdtr", tiny_config()).path), [])


@pytest.mark.parametrize("change", ["another file", "shorter"])
@pytest.mark.usefixtures("late")
def test_a_file_that_has_changed_is_refused(tmp_path: Path, gpu: Device, change: str) -> None:
    path = build(tmp_path / "a.kdtr", tiny_config()).path
    bundle = Bundle.open(path)
    if change == "another file":
        shutil.copy2(path, tmp_path / "copy")  # the same bytes, size and time
        os.replace(tmp_path / "copy", path)
    else:
        os.truncate(path, path.stat().st_size - 1)
    model = Model(bundle.config, Weights(bundle, gpu), gpu, 64)
    with pytest.raises(BundleError, match=r"a\.kdtr: has changed since it was opened"):
        model.preload()
    with pytest.raises(BundleError, match=r"a\.kdtr: has changed"):  # and no array without its bytes is kept
        model.weights.matrix("model.layers.0.self_attn.o_proj")


# ---- weights ---------------------------------------------------------------------------------------------------------

CONFIGS: dict[str, dict[str, Any]] = {
    "low-rank queries": {},
    "plain queries, two shared experts": {"q_lora_rank": None, "n_shared_experts": 2},
    "no shared expert, all layers sparse": {"n_shared_experts": 0, "first_k_dense_replace": 0},
    "a tied head, all layers dense": {"tie_word_embeddings": True, "first_k_dense_replace": 2},
}
SIZES = dict(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16)
"""Multiples of 16, as the kernels of tensor cores have them."""


def run(model: Model, device: Device) -> np.ndarray:
    """Logits of five tokens, by the kernels in the emulator."""
    chain = np.array([3, 1, 4, 1, 5], np.int32), np.arange(-1, 4, dtype=np.int32), np.arange(5, dtype=np.int32)
    with emulated():
        return model.forward(*chain, LatentCache(model.config, 8, device, model.weights.dtype)).logits


@pytest.mark.parametrize("ahead", [True, False], ids=["preload", "at first use"])
@pytest.mark.parametrize("storage", ["float32", "bfloat16", "int4", "some"])
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.usefixtures("late")
def test_the_same_logits_and_after_preload_nothing_is_read(
    tmp_path: Path, gpu: Device, monkeypatch: pytest.MonkeyPatch, kind: str, storage: str, ahead: bool
) -> None:
    config = tiny_config(**CONFIGS[kind])
    select = (lambda name: name.endswith("up_proj")) if storage == "some" else None
    path = build(tmp_path / "a.kdtr", config, storage="bfloat16" if storage == "some" else storage, select=select).path
    host = Device.named("emulated")
    expected = run(Model(config, Weights(Bundle.open(path), host), host, 64), host)
    bundle = Bundle.open(path)
    model = Model(config, Weights(bundle, gpu), gpu, 64)
    if ahead:
        steps: list[tuple[int, int]] = []
        model.preload(lambda done, total: steps.append((done, total)))
        assert steps[-1][0] == steps[-1][1] <= bundle.nbytes
        assert steps == sorted(steps)
        for reader in ("__getitem__", "read_into", "weight"):
            monkeypatch.setattr(bundle.__class__, reader, None)  # whoever calls it fails
    assert_same_bits(run(model, gpu), expected)


@pytest.mark.parametrize("by", [Model.preload, run], ids=["a preload", "a pass"])
@pytest.mark.usefixtures("late")
def test_what_is_there_is_not_sent_again(tmp_path: Path, gpu: Device, by: Callable[..., object]) -> None:
    """``kv_b_proj`` neither, which is not kept as it is stored."""
    bundle = Bundle.open(build(tmp_path / "a.kdtr", tiny_config()).path)
    model = Model(bundle.config, Weights(bundle, gpu), gpu, 64)
    by(model, *[gpu] * (by is run))
    sent: list[int] = []
    model.preload(lambda done, total: sent.append(total))
    assert sent == []


@pytest.mark.parametrize("ahead", [True, False], ids=["preload", "at first use"])
@pytest.mark.parametrize("storage", ["float32", "bfloat16", "int4"])
@pytest.mark.usefixtures("late")
def test_for_tensor_cores_weights_are_arranged_when_their_bytes_are_there(
    tmp_path: Path, gpu: Device, storage: str, ahead: bool
) -> None:
    config = tiny_config(**SIZES)
    bundle = Bundle.open(build(tmp_path / "a.kdtr", config, storage=storage).path)
    host = Device.named("emulated")
    expected = run(Model(config, Weights(bundle, host, bfloat16), host, 64), host)
    model = Model(config, Weights(bundle, gpu, bfloat16), gpu, 64)
    if ahead:
        model.preload()
    assert_same_bits(run(model, gpu), expected)
