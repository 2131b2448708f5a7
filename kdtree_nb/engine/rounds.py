"""A round: draft, build the tree, verify, accept, commit; on a GPU as two CUDA graphs.

All that a round needs to know, the last token, the committed length, how many tokens may still come, lies in buffers
beside the cache and is brought up to date by the round itself. So on a GPU the host has nothing to say in between: it
launches, and reads what was committed afterwards.
"""

from collections.abc import Callable, Hashable
from typing import NamedTuple, TypeVar

import numpy as np

from kdtree_nb.engine.cache import LatentCache
from kdtree_nb.engine.device import Device
from kdtree_nb.engine.drafter import Drafter, Proposal, cut
from kdtree_nb.engine.graph import Graph
from kdtree_nb.engine.model import Model
from kdtree_nb.kernels.choose_tokens import choose_tokens
from kdtree_nb.kernels.launch import Array
from kdtree_nb.kernels.tree_accept import Acceptance, tree_accept
from kdtree_nb.kernels.tree_build import tree_build
from kdtree_nb.reference.tree import DraftTree, check_marginals

PREFILL_ROWS = 64
PASSES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 65)
"""Rows of the passes that a budget with costs may choose on a GPU, which has a graph for each."""
FIRST_PASS = 24
"""The rows of a text's first pass, where nothing is known of it yet."""
MOST_GRAPHS = 64
"""That are kept: each holds the memory of a pass."""
T = TypeVar("T")


class Sampling(NamedTuple):
    """How the target chooses: see :func:`kdtree_nb.reference.sampling.choose_tokens`."""

    temperature: float = 0.0
    seed: int = 0
    top_k: int = 0
    top_p: float = 1.0


class Budget(NamedTuple):
    """How many nodes a round drafts at most; with ``costs`` float32 [nodes + 1] as many of them as pay."""

    nodes: int
    costs: Array | None = None


class Outcome(NamedTuple):
    """What a round did. On a GPU the next one may overwrite all of it.

    tree : DraftTree
        As it was verified, the padding of a GPU included.
    logits : float32 [rows, vocab]
    accepted : Acceptance
    """

    tree: DraftTree
    logits: Array
    accepted: Acceptance


class Rounds:
    """The rounds of one text after another, in buffers that stay where they are.

    Parameters
    ----------
    rows : int
        Of the cache: the longest text plus the largest budget.

    Attributes
    ----------
    cache : LatentCache
    root : int32 [1]
        The last committed token, whose latent the next round adds.
    left : int32 [1]
        How many tokens may still come.
    """

    def __init__(self, model: Model, drafter: Drafter, rows: int) -> None:
        self.model, self.device = model, model.device
        self.rows = rows
        self.cache = LatentCache(model.config, rows, model.device)
        self.drafter = drafter.start(self.cache)
        xp = self.device.xp
        self.root, self.left = xp.zeros(1, np.int32), xp.zeros(1, np.int32)
        self._alone = DraftTree(self.root, xp.full(1, -1, np.int32), xp.zeros(1, np.int32), xp.zeros(1, np.float32), 1)
        self._rows = FIRST_PASS
        self._graphs: dict[Hashable, Graph | None] = {}  # None: has run once

    def begin(self, prompt: np.ndarray, limit: int) -> None:
        """Start a text: all tokens of the prompt but the last are committed, a chunk of rows at a time."""
        self.cache.length[:] = 0
        prefill(self.model, self.cache, prompt[:-1], self.drafter)
        self.root[:] = int(prompt[-1])
        self.left[:] = limit
        self._rows = FIRST_PASS

    def run(self, decoder: str, budget: Budget, committed: list[int], sampling: Sampling) -> Outcome:
        """One round.

        Parameters
        ----------
        decoder : {"ar", "chain", "ddtree"}
        committed : list of int
            The text so far, for drafters that work on the host.

        Raises
        ------
        ValueError
            If the drafter proposes what are no log-probabilities, or no tokens of the target.
        """
        drafts = decoder != "ar" and budget.nodes > 0
        fixed = self.device.name == "cuda" and (not drafts or self.drafter.on_device)
        what = (decoder, budget.nodes, budget.costs is None) if drafts else ("ar",)
        tree, max_path = self._alone, 1
        if drafts:
            draft = ("draft", *what)
            tree, max_path = self._do(draft, fixed, lambda: self._draft(decoder, budget, committed))
            tree = self._cut(tree, budget, fixed)
            fixed = self._graphs.get(draft) is not None  # else the next draft writes another tree, elsewhere
        of = ("verify", *what, len(tree.tokens), sampling)
        logits, accepted = self._do(of, fixed, lambda: self._verify(tree, max_path, sampling))
        return Outcome(tree, logits, accepted)

    def _do(self, key: Hashable, fixed: bool, step: Callable[[], T]) -> T:
        """Run a step; what is fixed is recorded at the second time and launched from then on.

        A pass that is recorded reads the tree of its draft's graph, so all graphs are forgotten together.
        """
        if not fixed:
            return step()
        if key not in self._graphs:
            if len(self._graphs) >= MOST_GRAPHS:
                self._graphs.clear()
            self._graphs[key] = None
            return step()
        graph = self._graphs[key] or Graph(step)
        self._graphs[key] = graph
        return graph.launch()

    def _draft(self, decoder: str, budget: Budget, committed: list[int]) -> tuple[DraftTree, int]:
        """The tree to verify, and how many nodes its longest path can have."""
        if self.drafter.on_device:
            log_probs, token_ids, children = self.drafter.propose_after(self.root)
        else:
            proposal = checked(self.drafter.propose(np.array(committed, np.int32)), self.model.config.vocab_size)
            log_probs, token_ids = self.device.put(proposal.log_probs), self.device.put(proposal.token_ids)
            children = None if proposal.children is None else self.device.put(proposal.children)
        log_probs = cut(log_probs, self.left - 1, chain=decoder == "chain")
        return tree_build(self.root, log_probs, token_ids, budget.nodes, children, budget.costs), 1 + len(token_ids)

    def drafted(self, tree: DraftTree) -> int:
        """How many nodes a round's tree had, the root included; the next pass has room for as many as paid now."""
        nodes = count_nodes(tree, self.device)
        self._rows = min((rows for rows in PASSES if rows >= nodes), default=PASSES[-1])
        return min(nodes, len(tree.tokens))

    def _cut(self, tree: DraftTree, budget: Budget, fixed: bool) -> DraftTree:
        """The rows of a tree that are worth a pass.

        NumPy knows where a tree ends. A GPU's host does not, and does not ask: where the cost of a pass is at stake, it
        takes the size that would have been right the round before.
        """
        if isinstance(tree.num_nodes, int):
            return tree.first(tree.num_nodes)
        if budget.costs is None:
            return tree
        if not fixed:
            return tree.first(count_nodes(tree, self.device))
        rows = slice(self._rows)
        columns = tree.tokens[rows], tree.parents[rows], tree.depths[rows], tree.scores[rows]
        return DraftTree(*columns, num_nodes=tree.num_nodes)

    def _verify(self, tree: DraftTree, max_path: int, sampling: Sampling) -> tuple[Array, Acceptance]:
        """One target forward over a tree: its logits, and what was accepted and committed."""
        logits, features = self.model.forward(tree.tokens, tree.parents, tree.depths, self.cache, self.drafter.taps)
        targets = choose_tokens(logits, self.cache.length, tree.depths, *sampling)
        accepted = tree_accept(tree.tokens, tree.parents, targets, max_path)
        if self.drafter.taps:
            self.drafter.observe(features[:, self.device.xp.maximum(accepted.path, 0)])
        self.cache.commit(accepted.path, accepted.length)
        self.root[:] = accepted.tokens[accepted.length - 1]
        self.left -= accepted.length
        return logits, accepted


def prefill(model: Model, cache: LatentCache, tokens: np.ndarray, drafter: Drafter | None = None) -> None:
    """Commit a prompt's latents, a chunk of rows at a time, and show them to the drafter; no logits are computed."""
    taps, put = drafter.taps if drafter else (), model.device.put
    for start in range(0, len(tokens), PREFILL_ROWS):
        chunk = tokens[start : start + PREFILL_ROWS]
        rows = np.arange(len(chunk), dtype=np.int32)
        _, features = model.forward(put(chunk), put(rows - 1), put(rows), cache, taps, logits_of=slice(0))
        if drafter and taps:
            drafter.observe(features)
        cache.commit(put(rows), put(np.array([len(chunk)], np.int32)))


def checked(proposal: Proposal, vocab_size: int) -> Proposal:
    """A host's proposal in the dtypes of the kernels, token ids 0 where there is no candidate.

    Raises
    ------
    ValueError
        If these are no log-probabilities, or no tokens of the target.
    """
    log_probs, token_ids, children = proposal
    log_probs, token_ids = np.ascontiguousarray(log_probs, np.float32), np.asarray(token_ids)
    check_marginals(log_probs, token_ids, children)
    possible = log_probs > -np.inf if log_probs.ndim == 2 else np.ones(token_ids.shape, bool)
    proposed = token_ids[possible]
    if proposed.size and not 0 <= proposed.min() <= proposed.max() < vocab_size:
        raise ValueError(
            f"decode: the drafter proposed token ids {proposed.min()}..{proposed.max()}, "
            f"expected 0 to {vocab_size - 1}, the target's vocabulary"
        )
    return Proposal(log_probs, np.where(possible, token_ids, 0).astype(np.int32), children)


def count_nodes(tree: DraftTree, device: Device) -> int:
    """How many nodes a tree has, the root included; waits for a GPU."""
    return tree.num_nodes if isinstance(tree.num_nodes, int) else int(device.host(tree.num_nodes)[0])
