"""The one place that asks whether a weight is INT4."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from kdtree_nb.bundle import Bundle
from kdtree_nb.bundle.format import DTYPES
from kdtree_nb.config import ModelConfig
from kdtree_nb.config.model import MAX_EXPERTS
from kdtree_nb.engine.device import Device
from kdtree_nb.engine.upload import Piece, upload
from kdtree_nb.kernels.dense_gemm import dense_gemm
from kdtree_nb.kernels.dense_mma import VECTOR, dense_mma
from kdtree_nb.kernels.embed import embed, filled
from kdtree_nb.kernels.launch import Array, address_of, array_module, runs_cuda
from kdtree_nb.kernels.moe import Experts, moe
from kdtree_nb.kernels.moe_mma import TiledExperts, moe_mma, tile_experts
from kdtree_nb.kernels.moe_pairs import Blocks
from kdtree_nb.kernels.to_bfloat16 import to_bfloat16
from kdtree_nb.kernels.w4a16_gemm import w4a16_gemm
from kdtree_nb.kernels.w4a16_mma import tile_weight, w4a16_mma
from kdtree_nb.reference.linear import COLUMNS, Tiles, linear, tile

PROJECTIONS = "gate_proj", "up_proj", "down_proj"
"""Of an expert, in the order in which they are stacked: the first two together."""


class Weights:
    """A bundle's weights, each loaded on first use and kept in the one layout that its use needs.

    The kernels multiply with weights as they are stored. NumPy has no INT4 product: there a packed weight is
    dequantised, once, when it first meets an input, and experts that no token chose stay on the disk.

    A GPU gets the stored bytes by :func:`~kdtree_nb.engine.upload.upload`, straight into the arrays that kernels read.

    Parameters
    ----------
    dtype : float32 or bfloat16
        What enters a product. With bfloat16, floats and scales are rounded when they are loaded and inputs where they
        are not yet, sums are float32, and the kernels are those of tensor cores. NumPy rounds in the same places, with
        two exceptions: only kernels round the weights of the target's attention, and INT4 that is stacked with floats.
    """

    def __init__(self, bundle: Bundle, device: Device, dtype: Any = np.float32) -> None:
        self._bundle = bundle
        self._device = device
        self.dtype = np.dtype(dtype)
        self._narrow = self.dtype == bfloat16
        self._vectors: dict[tuple[str, ...], Array] = {}
        self._stored: dict[tuple[str, ...], tuple[Any, ...]] = {}
        self._tiles: dict[tuple[str, ...], Tiles] = {}
        self._expert_tiles: dict[tuple[str, int], tuple[Tiles, Tiles]] = {}
        self._experts: dict[str, tuple[Any, ...]] = {}
        self._shared_behind: dict[str, int] = {}
        self._awaited: list[Piece] | None = None  # within preload: what its one upload will bring

    def preload(
        self,
        products: Iterable[tuple[str, ...]],
        experts: Iterable[tuple[str, ModelConfig]],
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Load now, in one upload, what :meth:`linear` and :meth:`experts` would load when called with these names.

        ``progress`` is called with the bytes sent so far and the bytes of all.
        """
        known = {*self._stored, *self._experts}
        self._awaited = []
        try:
            for names in products:
                alike = len({self._is_packed(name) for name in names}) == 1
                for together in [names] if alike else [(name,) for name in names]:
                    self._on_device(together, *((".qw", ".sc") if self._is_packed(together[0]) else ("",)))
            for at, config in experts:
                self.experts(at, config)
            self._send(self._awaited, progress)
            for names in self._stored.keys() - known:
                self._stored[names] = self._arranged(*self._stored[names])
            for at in self._experts.keys() - known:
                self._experts[at] = self._arranged_experts(*self._experts[at])
        except BaseException:  # arrays whose bytes have not come must not be found
            self._stored.clear()
            self._experts.clear()
            raise
        finally:
            self._awaited = None

    @property
    def on_tensor_cores(self) -> bool:
        """Whether products are those kernels', which do not take every size."""
        return self._narrow and self._device.name != "cpu"

    def check(self, products: Iterable[str], sizes: Mapping[str, tuple[int, int]] | None = None) -> None:
        """Refuse now what the first pass would fail on: sizes that the kernels of tensor cores do not take.

        Parameters
        ----------
        products : weights
            That :meth:`linear` is going to be called with.
        sizes : from a name in the config to (size, whole number)
            Of what it has to be a multiple.

        Raises
        ------
        ValueError
            The message names bundle, size, and what was expected.
        """
        if not self.on_tensor_cores:
            return
        dense = [name for name in products if not self._is_packed(name)]  # groups of 32 inputs fit
        inputs = {f"inputs of {name}": (self._bundle.entries[name].shape[1], VECTOR) for name in dense}
        for what, (size, of) in {**(sizes or {}), **inputs}.items():
            if size % of:
                raise ValueError(
                    f"{self._bundle.path}: {what}={size}, expected a multiple of {of}, as the kernels of "
                    "dtype='bfloat16' take it; those of 'float32' take any"
                )

    def kinds(self) -> dict[str, int]:
        """How many tensors of each dtype there are: with the config, what a forward pass costs."""
        return dict(Counter(entry.dtype for entry in self._bundle.entries.values()))

    def linear(self, x: Array, *names: str) -> Array:
        """``x · weightᵀ``: W4A16 where the bundle holds ``NAME.qw``, else dense.

        Parameters
        ----------
        x : float32 or bfloat16 [tokens, in]
        names : weights
            Several give their outputs side by side, from a single product.

        Returns
        -------
        float32 [tokens, out]
        """
        x = self._entering(x)
        if not runs_cuda(x):
            return linear(self._device.float32(x), self._tiled(names))
        packed = [self._is_packed(name) for name in names]
        if any(packed) and not all(packed):
            return joined(*(self.linear(x, name) for name in names))
        if all(packed):
            return (w4a16_mma if self._narrow else w4a16_gemm)(x, *self._on_device(names, ".qw", ".sc"))
        return (dense_mma if self._narrow else dense_gemm)(x, *self._on_device(names, ""))

    def heads(self, x: Array, weight: Array | Tiles, out: Array) -> None:
        """Each head's product with a weight of :meth:`stack`: dtype [tokens, heads, in] to out, dtype [.., .., out]."""
        by_head, result = x.swapaxes(0, 1), out.swapaxes(0, 1)
        if isinstance(weight, Tiles):
            result[...] = linear(self._device.float32(by_head), weight)
        else:
            (dense_mma if self._narrow else dense_gemm)(by_head, weight, result)

    def stack(self, matrices: Array) -> Array | Tiles:
        """Matrices of :meth:`matrix`, float32 [heads, out, in], laid out for :meth:`heads`."""
        if self._device.name == "cpu":
            return tile(matrices)
        return self._device.put(self._entering(self._device.xp.ascontiguousarray(matrices)))

    def moe(
        self,
        x: Array,
        expert_ids: Array,
        weights: Array,
        at: str,
        config: ModelConfig,
        shared: Array | None = None,
        blocks: Blocks | None = None,
    ) -> Array:
        """The weighted sum of each token's :meth:`experts`, by the kernels: dtype [tokens, hidden] to float32.

        ``shared``, what other experts have given, is added last. Experts that are not all INT4 have no kernel for
        tensor cores: the exact one takes what is rounded.
        """
        gate_up, down = self.experts(at, config)
        if isinstance(gate_up, TiledExperts):
            return moe_mma(x, expert_ids, weights, gate_up, down, shared, blocks)

        def entering(rows: Array) -> Array:
            return self._device.float32(self._entering(rows))

        return moe(entering(x), expert_ids, weights, gate_up, down, shared, blocks, entering)

    def experts(self, at: str, config: ModelConfig) -> tuple[Any, Any]:
        """The gate-and-up and the down projections of a layer's experts, for the kernels; see :meth:`shared_behind`."""
        if at not in self._experts:
            routed, shared = _expert_names(at, config)
            stored: tuple[Experts, ...] = self._stacked(routed, PROJECTIONS[:2]), self._stacked(routed, PROJECTIONS[2:])
            if self.shared_behind(at, config):
                stored += self._stacked(shared, PROJECTIONS[:2]), self._stacked(shared, PROJECTIONS[2:])
            self._experts[at] = self._arranged_experts(*stored) if self._awaited is None else stored
        return self._experts[at]

    def shared_behind(self, at: str, config: ModelConfig) -> int:
        """How many shared experts :meth:`experts` has behind the routed ones: all, if every expert is INT4 alike.

        A checkpoint holds them as one that is as wide as they are together. So cut, they need no products of their own:
        they are chosen by every token.
        """
        if at not in self._shared_behind:
            routed, shared = _expert_names(at, config)
            names = [f"{expert}.{projection}" for expert in routed + shared for projection in PROJECTIONS]
            packed = all(map(self._is_packed, names))
            alike = packed and len({self._bundle.entries[f"{name}.sc"].dtype for name in names}) == 1
            few = config.n_routed_experts + config.n_shared_experts <= MAX_EXPERTS
            self._shared_behind[at] = config.n_shared_experts if alike and few else 0
        return self._shared_behind[at]

    def expert_tiles(self, at: str, config: ModelConfig) -> Callable[[int], tuple[Tiles, Tiles]]:
        """From an expert's id to its gate-and-up and its down projection, for the CPU; shared ones follow the routed.

        A checkpoint holds all shared experts of a layer as one that is as wide as they are together.
        """

        def tiles_of(expert: int) -> tuple[Tiles, Tiles]:
            if (at, expert) not in self._expert_tiles:
                shared = expert - config.n_routed_experts
                name = f"{at}.shared_experts" if shared >= 0 else f"{at}.experts.{expert}"
                width = config.moe_intermediate_size
                own = slice(shared * width, (shared + 1) * width) if shared >= 0 else slice(None)
                gate, up, down = (self.matrix(f"{name}.{projection}") for projection in PROJECTIONS)
                self._expert_tiles[at, expert] = tile(np.concatenate([gate[own], up[own]])), tile(down[:, own])
            return self._expert_tiles[at, expert]

        return tiles_of

    def matrix(self, name: str) -> Array:
        """A float weight as float32 [out, in]; not kept, for those that re-arrange it."""
        if self._device.name == "cpu":
            return self._on_host(name)
        (stored,) = self._on_device((name,), "")
        del self._stored[(name,)]
        return self._device.float32(stored)

    def vector(self, *names: str) -> Array:
        """A norm's weight, a router's bias or a table that is read by rows: float32, as it is stored.

        Several of one shape come stacked.
        """
        if names not in self._vectors:
            stored = [self._bundle[name].astype(np.float32) for name in names]
            self._vectors[names] = self._device.put(stored[0] if len(stored) == 1 else np.stack(stored))
        return self._vectors[names]

    def embed(self, token_ids: Array, rows: int | None = None, rest: int = 0) -> Array:
        """As :func:`~kdtree_nb.kernels.embed.embed` of the embedding; a tied head and the embedding share one table."""
        name = "model.embed_tokens"
        if self._device.name == "cpu" and "lm_head" not in self._bundle:
            token_ids = filled(token_ids, rows, rest)
            return self._tiled((name,)).values[token_ids // COLUMNS, :, token_ids % COLUMNS]
        (table,) = self._on_device((name,), "")
        return embed(table, token_ids, rows, rest)

    def _is_packed(self, name: str) -> bool:
        return f"{name}.qw" in self._bundle

    def _on_host(self, name: str) -> np.ndarray:
        if self._narrow and self._is_packed(name):
            stored = self._bundle.quantized(name)
            return replace(stored, scales=self._entering(stored.scales)).dequantized
        return self._entering(self._bundle.weight(name)).astype(np.float32, copy=False)

    def _tiled(self, names: tuple[str, ...]) -> Tiles:
        if names not in self._tiles:
            self._tiles[names] = tile(np.concatenate([self._on_host(name) for name in names]))
        return self._tiles[names]

    def _on_device(self, names: tuple[str, ...], *parts: str) -> tuple[Any, ...]:
        if names not in self._stored:
            stored = tuple(self._side_by_side(names, part) for part in parts)
            self._stored[names] = self._arranged(*stored) if self._awaited is None else stored
        return self._stored[names]

    def _entering(self, array: Array) -> Array:
        """A float array as it enters a product; codes as they are."""
        if not self._narrow or array.dtype in (bfloat16, np.uint16, np.int32):
            return array
        return to_bfloat16(array.astype(np.float32, copy=False))

    def _arranged(self, *stored: Array) -> tuple[Any, ...]:
        """What a product takes of a weight, or of its codes and scales, once they are on the device."""
        rounded = tuple(map(self._entering, stored))
        return (tile_weight(*rounded),) if self._narrow and len(rounded) == 2 else rounded

    def _arranged_experts(self, gate_up: Experts, down: Experts, *shared: Experts) -> tuple[Any, Any]:
        """The same of a layer's experts, those that are shared cut into experts like the others and put behind them."""
        if shared:
            of_gate_up, of_down = _cut(shared[0], shared[1], down.in_features)
            gate_up, down = _behind(gate_up, of_gate_up), _behind(down, of_down)
        gate_up, down = _each(self._entering, gate_up), _each(self._entering, down)
        if self._narrow and gate_up.scales is not None and down.scales is not None:
            return tile_experts(gate_up.values, gate_up.scales), tile_experts(down.values, down.scales)
        return gate_up, down

    def _side_by_side(self, names: Sequence[str], part: str) -> Array:
        """Stored tensors one below the other, on the device."""
        entries = [self._bundle.entries[name + part] for name in names]
        dtypes = {DTYPES[entry.dtype] for entry in entries}
        if self._device.xp is not np and len(dtypes) == 1:
            rows = sum(entry.shape[0] for entry in entries)
            whole = self._device.empty((rows, *entries[0].shape[1:]), *dtypes)
            pieces, address = [], address_of(whole)
            for name, entry in zip(names, entries, strict=True):
                file, begin = self._bundle.place(name + part)
                pieces.append(Piece(file, begin, begin + entry.nbytes, address))
                address += entry.nbytes
            if self._awaited is None:
                self._send(pieces)
            else:
                self._awaited += pieces
            return whole
        arrays = [self._bundle[name + part] for name in names]
        if len(dtypes) > 1:  # floats of two kinds
            arrays = [array.astype(np.float32) for array in arrays]
        return self._device.put(arrays[0] if len(arrays) == 1 else np.concatenate(arrays))

    def _send(self, pieces: Sequence[Piece], progress: Callable[[int, int], None] | None = None) -> None:
        done, total = 0, sum(piece.end - piece.begin for piece in pieces)

        def advance(count: int) -> None:
            nonlocal done
            done += count
            if progress is not None:
                progress(done, total)

        self._device.wait()  # what the arrays are made of may still be in use
        upload(self._bundle, pieces, advance)

    def _stacked(self, experts: Sequence[str], projections: Sequence[str]) -> Experts:
        names_of_expert = [[f"{expert}.{projection}" for projection in projections] for expert in experts]
        packed = [self._is_packed(name) for names in names_of_expert for name in names]
        if any(packed) and not all(packed):  # one stack has one kind
            floats = [np.concatenate([self._on_host(name) for name in names]) for names in names_of_expert]
            return Experts(self._device.put(np.stack(floats)))
        parts = (".qw", ".sc") if all(packed) else ("",)
        everything = [name for names in names_of_expert for name in names]
        stacks = [self._side_by_side(everything, part) for part in parts]
        return Experts(*(stack.reshape(len(names_of_expert), -1, stack.shape[1]) for stack in stacks))


def _expert_names(at: str, config: ModelConfig) -> tuple[list[str], list[str]]:
    """Of a layer's routed experts, and of the one that is all its shared ones."""
    shared = [f"{at}.shared_experts"] if config.n_shared_experts else []
    return [f"{at}.experts.{expert}" for expert in range(config.n_routed_experts)], shared


def _each(change: Callable[[Array], Array], experts: Experts) -> Experts:
    """Experts with their values and, if any, their scales changed."""
    return Experts(change(experts.values), None if experts.scales is None else change(experts.scales))


def _cut(gate_up: Experts, down: Experts, width: int) -> tuple[Experts, Experts]:
    """One wide expert as several of that width: rows of its gates and of its ups, columns of its down projection."""
    count = down.in_features // width
    rows = _each(lambda array: array.reshape(2, count, width, -1).swapaxes(0, 1).reshape(count, 2 * width, -1), gate_up)
    return rows, _each(lambda array: array.reshape(array.shape[1], count, -1).swapaxes(0, 1), down)


def _behind(first: Experts, second: Experts) -> Experts:
    xp = array_module(first.values)
    return Experts(*(xp.concatenate(arrays) for arrays in zip(first, second, strict=True)))


def joined(*parts: Array) -> Array:
    """Arrays that differ in their last axis alone, one behind the other in it.

    Not by CuPy's ``concatenate``, which fetches addresses from the host: a graph could not repeat that.
    """
    first, features = parts[0], sum(part.shape[-1] for part in parts)
    whole = array_module(first).empty((*first.shape[:-1], features), first.dtype)
    at = 0
    for part in parts:
        whole[..., at : at + part.shape[-1]] = part
        at += part.shape[-1]
    return whole
