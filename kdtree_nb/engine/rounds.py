"""A round: draft, build the tree, verify, accept, commit; on a GPU as two CUDA graphs.

All that a round needs to know, the last token, the committed length, how many tokens may still come and how they are
chosen, lies in buffers beside the cache; what changes is brought up to date by the round itself. So on a GPU the host
has nothing to say in between: it launches, and reads what was committed afterwards.
"""

import math
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import numpy as np

from kdtree_nb.engine.cache import LatentCache
from kdtree_nb.engine.device import Mailbox
from kdtree_nb.engine.drafter import Drafter, Proposal
from kdtree_nb.engine.graph import Graph
from kdtree_nb.engine.model import Model
from kdtree_nb.kernels.choose_tokens import WORDS, Sampling, choose_tokens
from kdtree_nb.kernels.close_round import close_round
from kdtree_nb.kernels.launch import Array
from kdtree_nb.kernels.tree_accept import tree_accept
from kdtree_nb.kernels.tree_build import MAX_BUDGET, tree_build
from kdtree_nb.reference.tree import DraftTree, check_marginals

PREFILL_ROWS = 64
PASSES = (1, 2, 3, 5, 9, 13, 17, 25, 33, 49, 65)
"""Rows of the passes that a budget with costs may choose on a GPU, which has a graph for each."""
FIRST_PASS = 25
"""The rows of a text's passes while nothing is known of it yet."""
GRAPH_BYTES = 2**31
"""Of device memory that recorded rounds may hold before others are recorded: with more, they are forgotten."""
UNRECORDED = 2
"""Rounds of a kind before all of them is recorded: a draft is in the second, a pass only behind a recorded draft."""
ALONE = ("alone",)
"""The kind of a round that drafts nothing."""
T = TypeVar("T")


class Budget(NamedTuple):
    """How many nodes a round drafts at most; with ``costs`` float32 [nodes + 1] about as many as pay, by ``gain``."""

    nodes: int
    costs: Array | None = None
    gain: float = 1.0


class Outcome(NamedTuple):
    """What a round does. On a GPU it may still run; the next one may overwrite tree and logits.

    tree : DraftTree
        As it is verified, the padding of a GPU included.
    logits : float32 [rows, vocab]
    report : function
        For :meth:`Rounds.read`: waits for the round.
    """

    tree: DraftTree
    logits: Array
    report: Callable[[], np.ndarray]


class Report(NamedTuple):
    """What the host is told of a round.

    nodes, paying : int
        Of its tree, the root included.
    tokens : list of int
        It committed.
    path : int32 [tokens]
        The accepted nodes, the root first.
    """

    nodes: int
    paying: int
    tokens: list[int]
    path: np.ndarray


class Rounds:
    """The rounds of one text after another, in buffers that stay where they are.

    Parameters
    ----------
    rows : int
        Of the cache: the longest text plus the largest budget.

    Attributes
    ----------
    of : Drafter
        That they were made for.
    drafter : Drafter
        Which it started for these rounds.
    cache : LatentCache
    root : int32 [1]
        The last committed token, whose latent the next round adds.
    left : int32 [1]
        How many tokens may still come.
    sampling : uint64 [4]
        How they are chosen: :meth:`Sampling.words`.
    """

    def __init__(self, model: Model, drafter: Drafter, rows: int) -> None:
        self.model, self.device = model, model.device
        self.rows = rows
        self.cache = LatentCache(model.config, rows, model.device, model.weights.dtype)
        self.of, self.drafter = drafter, drafter.start(self.cache)
        xp = self.device.xp
        self.root, self.left, self.sampling = xp.zeros(1, np.int32), xp.zeros(1, np.int32), xp.zeros(WORDS, np.uint64)
        self._chunk = tuple(xp.zeros(size, np.int32) for size in (PREFILL_ROWS, PREFILL_ROWS, PREFILL_ROWS, 1))
        columns = self.root, xp.full(1, -1, np.int32), xp.zeros(1, np.int32), xp.zeros(1, np.float32)
        self._alone = DraftTree(*columns, num_nodes=1, paying=1)
        self._mailbox = Mailbox(self.device, 3 + 2 * (1 + MAX_BUDGET))
        self._paid = 0.0
        self._graphs: dict[tuple[Hashable, ...], Graph | None] = {}  # None: has run once
        self._places: dict[int, tuple[Array, ...]] = {}  # by rows: where a tree lies that was drafted on the host

    def begin(self, prompt: np.ndarray, limit: int, sampling: Sampling) -> None:
        """Start a text: all tokens of the prompt but the last are committed, a chunk of rows at a time."""
        self.cache.length[:] = 0
        self._read_prompt(prompt[:-1])
        self.root[:] = int(prompt[-1])
        self.left[:] = limit
        self.sampling[:] = self.device.put(sampling.words())
        self._paid = 0.0

    def _read_prompt(self, tokens: np.ndarray) -> None:
        """As :func:`prefill`; a GPU records a whole chunk, whose last rows are padding where a prompt ends."""
        room = min(self.rows, self.model.capacity)
        for start in range(0, len(tokens), PREFILL_ROWS):
            chunk = tokens[start : start + PREFILL_ROWS]
            if self.unattended(False) and start + PREFILL_ROWS <= room:
                for place, column in zip(self._chunk, chunk_columns(chunk, PREFILL_ROWS), strict=True):
                    place[:] = self.device.put(column)
                self._do(("prompt",), True, self._commit_chunk)
            else:
                prefill(self.model, self.cache, chunk, self.drafter)

    def _commit_chunk(self) -> None:
        commit_chunk(self.model, self.cache, self.drafter, *self._chunk)

    def record(self, decoder: str, budget: Budget) -> None:
        """Record the passes among which a budget with costs chooses; a text would have to wait for each in its midst.

        To be called before a text begins, which overwrites what these rounds leave behind. Where recorded rounds hold
        more than ``GRAPH_BYTES``, and those of this text are not among them, they are forgotten first.
        """
        key = _key(decoder, budget)
        if any(graph and (what == key or what[:2] == ("verify", key)) for what, graph in self._graphs.items()):
            return
        if sum(graph.nbytes for graph in self._graphs.values() if graph) > GRAPH_BYTES:
            self.device.host(self.left)  # a round that nobody read may be running
            self._graphs.clear()  # all: a pass that is recorded reads the tree of its draft's graph
        if budget.costs is None or not self.unattended(True):
            return
        for rows, fewer in zip(PASSES, (0, *PASSES), strict=False):
            if fewer > budget.nodes:
                break
            for _ in range(UNRECORDED + 1):
                self.cache.length[:], self._paid = 0, float(rows)
                self.run(decoder, budget, [])

    def unattended(self, drafts: bool) -> bool:
        """Whether a round needs nothing of the host, so that it can be launched before the last one was read.

        On a GPU, if nothing proposes or observes on the host. A round that comes after the text's last token stays
        within the rows of the text and of a budget, too: it has a root, and drafts nothing.
        """
        hosted = not self.drafter.on_device and (drafts or bool(self.drafter.taps))
        return self.device.name == "cuda" and not hosted

    def run(self, decoder: str, budget: Budget, committed: list[int]) -> Outcome:
        """One round; a GPU is not waited for.

        Parameters
        ----------
        decoder : {"ar", "chain", "ddtree"}
        committed : list of int
            The text so far, for drafters that work on the host; nothing reads it where rounds are unattended.

        Raises
        ------
        ValueError
            If the drafter proposes what are no log-probabilities, or no tokens of the target.
        """
        key = _key(decoder, budget)
        drafts = key is not ALONE
        fixed = self.unattended(drafts)
        tree, max_path = self._alone, 1
        if drafts:
            tree, max_path = self._do(key, fixed, self._draft, decoder, budget, committed)
            tree = self._cut(tree, budget, fixed)
            if fixed:
                fixed = self._graphs.get(key) is not None  # else the next draft writes another tree, elsewhere
            elif self.device.name == "cuda" and not self.drafter.taps:
                tree, fixed = self._placed(tree), True
        of = ("verify", key, len(tree.tokens), max_path)
        logits, report = self._do(of, fixed, self._verify, tree, max_path)
        return Outcome(tree, logits, self._mailbox.send(report))

    def read(self, outcome: Outcome) -> Report:
        """Wait for a round, and read it."""
        numbers = outcome.report()
        nodes, paying, length = numbers[:3].tolist()
        tokens, path = numbers[3:].reshape(2, -1)[:, :length]
        self._paid = math.sqrt((self._paid or paying) * paying)
        rows = len(outcome.tree.tokens)
        return Report(min(nodes, rows), min(paying, rows), tokens.tolist(), path)

    def _do(self, key: tuple[Hashable, ...], fixed: bool, step: Callable[..., T], *arguments: Any) -> T:
        """Run a step; what is fixed is recorded at the second time and launched from then on."""
        if not fixed:
            return step(*arguments)
        if key not in self._graphs:
            self._graphs[key] = None
            return step(*arguments)
        graph = self._graphs[key] or Graph(step, *arguments)
        self._graphs[key] = graph
        return graph.launch()

    def _draft(self, decoder: str, budget: Budget, committed: list[int]) -> tuple[DraftTree, int]:
        """The tree to verify, and how many nodes its longest path can have."""
        if self.drafter.on_device:
            log_probs, token_ids, children = self.drafter.propose_after(self.root)
            deepest = len(token_ids)
        else:
            proposal = checked(self.drafter.propose(np.array(committed, np.int32)), self.model.config.vocab_size)
            log_probs, token_ids = self.device.put(proposal.log_probs), self.device.put(proposal.token_ids)
            children = None if proposal.children is None else self.device.put(proposal.children)
            deepest = budget.nodes  # whatever it has found this time: the passes of a size are one
        proposed = log_probs, token_ids, budget.nodes, children, budget.costs, budget.gain
        tree = tree_build(self.root, *proposed, self.left, chain=decoder == "chain")
        return tree, 1 + min(deepest, budget.nodes)

    def _cut(self, tree: DraftTree, budget: Budget, fixed: bool) -> DraftTree:
        """The rows of a tree that are worth a pass.

        NumPy knows how many pay. A GPU's host does not, and does not ask: where the cost of a pass is at stake, it
        takes the size nearest to the mean of what paid in the rounds that it has read: a geometric mean, which one
        large tree does not move far, and half of which is the last round, as a text goes from easy to hard. A row more
        or less is no matter of cost, then: as many nodes are verified as the pass has rows.
        """
        if isinstance(tree.paying, int):
            return tree.first(tree.paying)
        if budget.costs is None:
            return tree
        if fixed:
            size = self._paid or FIRST_PASS
            rows = min(PASSES, key=lambda rows: max(rows / size, size / rows))
        else:
            paying = int(self.device.host(tree.paying)[0])
            rows = next(rows for rows in PASSES if rows >= paying) if self.device.name == "cuda" else paying
        return tree.first(rows)

    def _placed(self, tree: DraftTree) -> DraftTree:
        """A tree that the host has drafted, where the recorded pass of its size looks for it."""
        rows, columns = len(tree.tokens), (tree.tokens, tree.parents, tree.depths, tree.scores)
        if rows not in self._places:
            sizes = [self.device.xp.zeros(1, np.int32) for _ in range(2)]
            self._places[rows] = *(column.copy() for column in columns), *sizes
        place = self._places[rows]
        for to, of in zip(place, (*columns, tree.num_nodes, tree.paying), strict=True):
            to[:] = of
        return DraftTree(*place)

    def _verify(self, tree: DraftTree, max_path: int) -> tuple[Array, Array]:
        """One target forward over a tree: its logits, and what was accepted and committed.

        The second is all that the host has to read: of :func:`close_round`, where a CPU has no padding.
        """
        logits, features = self.model.forward(tree.tokens, tree.parents, tree.depths, self.cache, self.drafter.taps)
        targets = choose_tokens(logits, self.cache.length, tree.depths, self.sampling)
        accepted = tree_accept(tree.tokens, tree.parents, targets, max_path)
        if self.drafter.taps:
            self.drafter.observe(features[accepted.path])  # −1, where the path has ended, is some row too
        self.cache.commit(accepted.path, accepted.length)
        return logits, close_round(accepted, tree.num_nodes, tree.paying, self.root, self.left)


def prefill(model: Model, cache: LatentCache, tokens: np.ndarray, drafter: Drafter | None = None) -> None:
    """Commit a prompt's latents, a chunk of rows at a time, and show them to the drafter; no logits are computed."""
    for start in range(0, len(tokens), PREFILL_ROWS):
        chunk = tokens[start : start + PREFILL_ROWS]
        commit_chunk(model, cache, drafter, *map(model.device.put, chunk_columns(chunk, len(chunk))))


def chunk_columns(tokens: np.ndarray, rows: int) -> tuple[np.ndarray, ...]:
    """A chain of tokens for :func:`commit_chunk`: tokens, parents, depths int32 [rows], −1 in padding, and how many."""
    columns = np.full((3, rows), -1, np.int32)
    columns[:, : len(tokens)] = tokens, np.arange(-1, len(tokens) - 1), np.arange(len(tokens))
    return *columns, np.array([len(tokens)], np.int32)


def commit_chunk(
    model: Model,
    cache: LatentCache,
    drafter: Drafter | None,
    tokens: Array,
    parents: Array,
    depths: Array,
    count: Array,
) -> None:
    """Commit the first ``count`` of a chunk's tokens, and show them to the drafter."""
    taps = drafter.taps if drafter else ()
    _, features = model.forward(tokens, parents, depths, cache, taps, logits_of=slice(0))
    if drafter and taps:
        drafter.observe(features)
    cache.commit(depths, count)  # a chain's node i is its i-th row


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


def _key(decoder: str, budget: Budget) -> tuple[Hashable, ...]:
    """Of what a recorded draft depends on."""
    drafts = decoder != "ar" and budget.nodes > 0
    return (decoder, budget.nodes, budget.costs is None, budget.gain) if drafts else ALONE
