"""The front door: load a bundle, generate."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kdtree_nb.bundle import Bundle
from kdtree_nb.bundle.format import DRAFTER_SUFFIX, INDEX_SUFFIX, SUFFIX
from kdtree_nb.bundle.headers import find
from kdtree_nb.config import ModelConfig
from kdtree_nb.engine.budget import round_costs
from kdtree_nb.engine.decode import Generation, OnRound, decode
from kdtree_nb.engine.device import Device
from kdtree_nb.engine.dflash import DFlash
from kdtree_nb.engine.drafter import NO_DRAFTER, Drafter, PromptLookup
from kdtree_nb.engine.model import Model
from kdtree_nb.engine.options import check_options, dtype_named, require
from kdtree_nb.engine.rounds import Budget, Rounds
from kdtree_nb.engine.weights import Weights
from kdtree_nb.kernels.choose_tokens import Sampling

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SURROGATE = re.compile("[\ud800-\udfff]")  # what undecodable bytes of a command line become
LONGEST_BY_DEFAULT = 2**18
"""A bundle may claim any length, and tables are made for all of it."""
ROWS_AT_ONCE = 256
"""By which caches grow."""
MOST_KEPT = 3
"""Rounds that are kept from text to text: plain decoding's, the trained drafter's, and those of a variant of it."""


class Engine:
    """A loaded bundle and its drafter. Use :meth:`load`.

    Attributes
    ----------
    dtype : {"float32", "bfloat16"}
        As it was loaded.
    drafter : Drafter
        What :meth:`generate` drafts with by default: the trained one, or prompt look-up where there is none.
    """

    def __init__(
        self, bundle: Bundle, drafter: Bundle | None, capacity: int, device: Device, dtype: str = "float32"
    ) -> None:
        if not isinstance(bundle.config, ModelConfig):
            raise ValueError(f"{bundle.path} holds a drafter, expected the model that it drafts for")
        self.bundle = bundle
        self.config = bundle.config
        self.capacity = capacity
        self.device = device
        self.dtype = dtype
        self.model = Model(bundle.config, Weights(bundle, device, dtype_named(dtype)), device, capacity)
        self.drafter = PromptLookup() if drafter is None else DFlash(drafter, self.model, device, capacity)
        self._kept: list[Rounds] = []  # the last used last
        self._tokenizer: Tokenizer | None = None

    @classmethod
    def load(
        cls,
        path: str | Path,
        device: str = "auto",
        capacity: int | None = None,
        drafter: str | Path | None = None,
        dtype: str = "float32",
    ) -> "Engine":
        """Open a KDTR bundle, and its drafter.

        Parameters
        ----------
        path : path
            A ``.kdtr`` file, an index of shards, or a folder that holds one of them.
        device : {"auto", "cuda", "cpu", "emulated"}
            ``cpu`` runs the NumPy specification, ``cuda`` the kernels, ``emulated`` the kernels' source on the CPU;
            ``auto`` is ``cuda`` where there is a GPU, else ``cpu``.
        capacity : int, optional
            Longest sequence, prompt included; by default the model's ``max_position_embeddings``, at most 262,144.
        drafter : path, optional
            The bundle of a trained drafter; by default ``NAME.drafter.kdtr`` beside ``NAME.kdtr``, where there is one.
        dtype : {"float32", "bfloat16"}
            What model and trained drafter multiply: float32 exactly as stored, or bfloat16 on tensor cores, summed in
            float32, with caches of bfloat16. Kernels of tensor cores take multiples of 8 or 16 of some sizes.

        Raises
        ------
        BundleError
            If the bundle is malformed.
        ValueError
            For a bad argument, two bundles that do not belong together, or sizes that ``dtype`` has no kernels for.
        """
        chosen = Device.named(device)
        dtype_named(dtype)
        bundle = Bundle.open(path)
        longest = bundle.config.max_position_embeddings
        capacity = min(longest, LONGEST_BY_DEFAULT) if capacity is None else capacity
        if not (isinstance(capacity, int | np.integer) and 2 <= capacity <= longest):
            raise ValueError(f"Engine.load: capacity={capacity}, expected 2 to max_position_embeddings={longest}")
        if drafter is None:
            name = bundle.path.name.removesuffix(INDEX_SUFFIX).removesuffix(SUFFIX)
            beside = find(bundle.path.with_name(name + DRAFTER_SUFFIX))
            drafter = beside if beside.exists() else None
        return cls(bundle, None if drafter is None else Bundle.open(drafter), capacity, chosen, dtype)

    def preload(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Bring all of the model's weights to the GPU now, in one upload; without it, each comes at its first use.

        On a CPU nothing is done: there, experts that no token chooses are never read.

        Parameters
        ----------
        progress : callable, optional
            Called with the bytes sent so far and the bytes of all.

        Raises
        ------
        ValueError
            If the GPU has less memory free than the bundle takes.
        """
        if self.device.name == "cuda":
            with self.device.running():
                needed, free = self.bundle.nbytes, self.device.bytes_free()
                if needed > free:
                    raise ValueError(
                        f"{self.bundle.path}: weights of {needed / 1e9:,.1f} GB, more than the {free / 1e9:,.1f} GB "
                        f"that are free on {self.device.description()}"
                    )
                self.model.preload(progress)

    @property
    def tokenizer(self) -> "Tokenizer | None":
        """The tokenizer beside the bundle, if it names one."""
        if self._tokenizer is None and self.bundle.tokenizer is not None:
            from tokenizers import Tokenizer

            path = self.bundle.path.parent / self.bundle.tokenizer
            if not path.is_file():
                raise FileNotFoundError(
                    f"{self.bundle.path} names the tokenizer {path.name}, which is not beside it: "
                    "without it, give the prompt as token ids (--token-ids)"
                )
            try:
                self._tokenizer = Tokenizer.from_file(str(path))
            except Exception as error:  # the library raises no narrower class
                raise ValueError(f"{path} is not a tokenizer: {error}") from error
        return self._tokenizer

    def generate(
        self,
        prompt: str | Sequence[int] | np.ndarray,
        decoder: str = "ddtree",
        node_budget: int | str = 16,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        seed: int = 0,
        top_k: int = 0,
        top_p: float = 1.0,
        drafter: Drafter | None = None,
        on_token: Callable[[int], None] | None = None,
        on_round: OnRound | None = None,
        keep_logits: bool = False,
    ) -> Generation:
        """Extend a prompt.

        Parameters
        ----------
        prompt : str or token ids
            At least one token, and at most ``capacity − 1``.
        decoder : {"ar", "chain", "ddtree"}
            Plain decoding, a drafted chain, or a draft tree. All give the same tokens.
        node_budget : int or "auto"
            Drafted nodes a round, B; the root is not counted, so a pass has up to B + 1 rows. ``auto`` drafts
            about as many as pay in expected tokens per second, by what rounds cost here: :func:`round_costs`.
        temperature : float
            0 takes the most probable token, lowest id first; above it, samples from softmax(logits / temperature).
        seed : int
            Of the samples: the same seed gives the same text, whatever the decoder and its budget.
        top_k : int
            Sample from the k most probable tokens; 0 from all.
        top_p : float
            Of these, sample from the fewest that have this share of their probability; 1 from all.
        drafter : Drafter, optional
            By default :attr:`drafter`.
        on_token : callable, optional
            Called with each token as its round commits it.
        on_round : callable, optional
            Called after each round with its tree and the accepted path; a GPU has to wait for it.
        keep_logits : bool
            Return the logits that chose each token; a GPU has to wait for them.

        Raises
        ------
        ValueError
            For a bad argument, named with its value.
        """
        sampling = Sampling(temperature, seed, top_k, top_p)
        check_options(decoder, node_budget, max_new_tokens, sampling)
        token_ids, tokenizer = self.token_ids(prompt), self._tokenizer_for(prompt)
        with self.device.running():
            if decoder == "ar":
                drafter, budget = NO_DRAFTER, Budget(0)
            else:
                drafter = self.drafter if drafter is None else drafter
                budget = self._budget(node_budget, drafter, temperature)
            limit = min(max_new_tokens, self.capacity - len(token_ids))
            with self._rounds(drafter, len(token_ids) + limit + budget.nodes) as rounds:
                generation = decode(
                    rounds, token_ids, limit, decoder, budget, sampling, on_token, on_round, keep_logits
                )
        if generation.finish_reason == "length" and len(generation.tokens) < max_new_tokens:
            generation.finish_reason = "capacity"
        if tokenizer is not None:
            generation.text = tokenizer.decode(generation.tokens)
        return generation

    def _tokenizer_for(self, prompt: object) -> "Tokenizer | None":
        """What makes a text of the answer, where it is there; a prompt that is a text cannot do without."""
        named = self.bundle.tokenizer
        there = named is not None and (self.bundle.path.parent / named).is_file()
        return self.tokenizer if there or isinstance(prompt, str) else None

    def release(self) -> None:
        """Free the caches and recorded rounds that are kept for the next text, which then makes its own."""
        self._kept.clear()

    @contextmanager
    def _rounds(self, drafter: Drafter, rows: int) -> Iterator[Rounds]:
        """With room for a text; kept from text to text for plain decoding, for this engine's drafter and trained ones.

        While a text is written they are its own: a text that is begun meanwhile gets others.
        """
        found = next((kept for kept in self._kept if kept.of is drafter), None)
        self._kept = [kept for kept in self._kept if kept is not found]
        if found is None or found.rows < rows:
            found = None  # its memory is free before more is taken
            found = Rounds(self.model, drafter, -(-rows // ROWS_AT_ONCE) * ROWS_AT_ONCE)
        yield found
        if drafter is NO_DRAFTER or drafter is self.drafter or isinstance(drafter, DFlash):
            others = [kept for kept in self._kept if kept.of is not drafter]
            self._kept = [*others, found][-MOST_KEPT:]

    def _budget(self, nodes: int | str, drafter: Drafter, temperature: float) -> Budget:
        if nodes != "auto":
            return Budget(int(nodes))
        costs = round_costs(self.model, drafter, self.capacity)
        return Budget(len(costs) - 1, self.device.put(costs), 1.0 if temperature else drafter.greedy_gain)

    def token_ids(self, prompt: str | Sequence[int] | np.ndarray) -> np.ndarray:
        """A prompt as :meth:`generate` reads it, int32 [tokens].

        Raises
        ------
        ValueError
            If it is none for this bundle: a text without a tokenizer, ids beyond the vocabulary, or too many.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(f"{self.bundle.path} names no tokenizer: give the prompt as token ids (--token-ids)")
            require(not _SURROGATE.search(prompt), f"prompt {prompt[:40]!r} with lone surrogates", "Unicode text")
            prompt = self.tokenizer.encode(prompt).ids
        try:
            token_ids = np.asarray(prompt)
        except ValueError:  # lists of different lengths
            token_ids = np.empty((0, 0))
            require(False, f"prompt {str(prompt)[:40]}", "a list of tokens")
        require(token_ids.size > 0, "an empty prompt", "1 token or more")
        listed = token_ids.ndim == 1
        require(listed, f"prompt of shape {list(token_ids.shape)}", "a list of tokens")
        require(np.issubdtype(token_ids.dtype, np.integer), f"prompt of dtype {token_ids.dtype}", "whole numbers")
        require(
            0 <= token_ids.min() and token_ids.max() < self.config.vocab_size,
            f"prompt with token ids {token_ids.min()}..{token_ids.max()}",
            f"0 to {self.config.vocab_size - 1}",
        )
        require(len(token_ids) < self.capacity, f"prompt of {len(token_ids)} tokens", f"fewer than {self.capacity}")
        return token_ids.astype(np.int32)
