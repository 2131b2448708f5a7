# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 05 · Draft trees
#
# A pass of the target model over 15 tokens costs a GPU hardly more than a pass over one. Which 14 guesses are worth
# that pass, and how do they become text without a chance of a wrong token? One round, step by step: *marginals →
# best-first tree → mask → verify → accept → commit*. Each step is a few lines of NumPy, the specification, and a CUDA
# kernel that has to give the same.
#
# *You need* [00 · Quickstart](00_quickstart.ipynb), which shows a round from outside, and some NumPy.
#
# *You will learn* what a draft tree maximises and how it is found; why ties and roundings are part of the definition;
# what a tree's rows see, and at which positions; to walk and to commit; when a tree is worth more than a chain.
#
# *Runs in* about 30 s on a laptop, and half a minute more the first time, when kernels compile; GPU optional.

# %%
import itertools
import json

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import SVG, Markdown

from kdtree_nb import plotting
from kdtree_nb.engine import Engine
from kdtree_nb.engine.cache import LatentCache
from kdtree_nb.engine.rounds import prefill
from kdtree_nb.engine.device import Device, cuda_available
from kdtree_nb.golden import folder
from kdtree_nb.kernels.cache_commit import cache_commit
from kdtree_nb.kernels.launch import KernelError, emulated
from kdtree_nb.kernels.source import read_source
from kdtree_nb.kernels.top_k import top_k
from kdtree_nb.kernels.tree_accept import tree_accept
from kdtree_nb.kernels.tree_build import tree_build
from kdtree_nb.reference import sampling
from kdtree_nb.reference import tree as specification
from kdtree_nb.reference.tree_svg import tree_svg

plt.rcParams["figure.dpi"] = 120


# %% [markdown]
# The kernels run on a GPU if there is one, else their very source runs on the CPU, compiled by a C++ compiler. Where
# that is missing too, a kernel's function calls the specification, and the comparisons below hold by themselves.


# %%
def kernel_device() -> Device:
    if cuda_available():
        return Device.named("cuda")
    try:
        with emulated():
            tree_accept(*[np.full(1, -1, np.int32)] * 3, max_path=1)
    except KernelError:
        return Device.named("cpu")
    return Device.named("emulated")


device = kernel_device()


# %%
def on_kernels(function, *arguments):
    with device.running():
        return function(*(device.put(a) if isinstance(a, np.ndarray) else a for a in arguments))


def agree(name: str, specified: list, computed: list) -> None:
    assert all(np.array_equal(a, device.host(b)[: len(a)]) for a, b in zip(specified, computed, strict=True)), name
    print(f"{name}: kernel and specification agree")


def show_source(file: str, first: str, last: str) -> Markdown:
    text = read_source(file).text
    start = text.index(first)
    return Markdown(f"```cpp\n{text[start : text.index(last, start)]}{last}\n```")


# %% [markdown]
# ## What a tree is worth
#
# A drafter that guesses a whole block at once gives a distribution for each of the next L positions, and none for
# their combinations. Take three positions with the same six candidates, `a` … `f`. Without more knowledge, the
# probability that the text goes on with a given *prefix* is the product along it. What are the likeliest?

# %%
p = np.array([0.7, 0.15, 0.08, 0.04, 0.02, 0.01])
log_p = np.log(p).astype(np.float32)


def ranked_prefixes(length: int, dtype: type = np.float32) -> list[tuple[float, tuple[int, ...]]]:
    """All prefixes with their scores: the best first, equal ones by the smaller path of ranks."""
    scored = [(dtype(0), ())]
    for prefix_score, ranks in scored:
        if len(ranks) < length:
            scored += [(prefix_score + dtype(log_p[rank]), (*ranks, rank)) for rank in range(len(p))]
    return sorted(scored[1:], key=lambda entry: (-entry[0], entry[1]))


def spell(ranks: tuple[int, ...]) -> str:
    return "".join("abcdef"[rank] for rank in ranks)


for score, ranks in ranked_prefixes(3)[:10]:
    print(f"{spell(ranks):4} {np.exp(score):.4f}  {score:.4f}")

# %% [markdown]
# If a tree holds a prefix, it holds what leads there, which is at least as probable. So the B first prefixes of this
# order *are* a tree. How many of its nodes will be accepted? A node is, if the text goes on with its prefix. So the
# expected number is the sum of the nodes' probabilities, and no tree of B nodes has a larger one. That is all of
# DDTree (Ringel and Romano, arXiv 2604.12989). Let us hold it against all 216 ways in which the text can go on:

# %%
BUDGET = 14
log_probs, token_ids = np.tile(log_p, (3, 1)), np.tile(np.arange(6, dtype=np.int32), (3, 1))
root = np.array([6], np.int32)  # any token that was committed last
hand = specification.tree_build(6, log_probs, token_ids, BUDGET)


# %%
def accepted(tree: specification.DraftTree, continuation: np.ndarray) -> np.ndarray:
    """Nodes that are accepted if the text goes on like this."""
    targets = continuation[np.minimum(tree.depths, len(continuation) - 1)]
    return specification.tree_accept(tree.tokens, tree.parents, targets)[0][1:]


ways = [np.array([*way, -1]) for way in itertools.product(range(6), repeat=3)]
expected = sum(np.prod(p[way[:3]]) * len(accepted(hand, way)) for way in ways)
summed = sum(np.exp(score) for score, _ in ranked_prefixes(3)[:BUDGET])
print(f"drafts accepted over all ways {expected:.4f}, sum of the nodes' probabilities {summed:.4f}")

# %% [markdown]
# ## Best first
#
# Nobody enumerates all prefixes. Pop the best from a heap, push its first child and its next sibling: neither can be
# better than what was popped, so nodes come out in the order above. `tree_build` does that, and a tree draws itself;
# here with prefixes and probabilities. The numbers in front are *slots*, the order in which nodes came out.

# %%
hand_labels = ["root", *(f"{spell(ranks)} {np.exp(score):.3f}" for score, ranks in ranked_prefixes(3)[:BUDGET])]
SVG(tree_svg(hand_labels, hand.parents))

# %% [markdown]
# What do other shapes make of the same marginals? A chain has to stop after three nodes. A tree that gives every node
# its two best children has the same 14 nodes, and spends some of them on `bbb`:

# %%
two_each = [ranks for _, ranks in ranked_prefixes(3) if max(ranks) < 2]
chain = [(0,), (0, 0), (0, 0, 0)]
for name, prefixes in {"chain": chain, "two children each": two_each}.items():
    print(f"{name:18} {len(prefixes):2} nodes  {sum(np.prod(p[list(ranks)]) for ranks in prefixes):.4f} expected")
print(f"{'best first':18} {BUDGET:2} nodes  {summed:.4f} expected")

# %% [markdown]
# ## Ties are part of the definition
#
# `ab` and `ba` are equally probable. Which comes first decides which tree is verified, and so do roundings: `aab`,
# `aba` and `baa` are equal on paper, but sums of floats depend on their order. A kernel can only be held against a
# specification that says all of it. This one says: a score is one float32 addition a node, along the path; equal
# scores go by the smaller path of ranks, a prefix before its extensions. How often would sums in float64, also
# perfectly reasonable, choose other nodes?

# %%
float32, float64 = ([ranks for _, ranks in ranked_prefixes(4, dtype)] for dtype in (np.float32, np.float64))
differing = [budget for budget in range(1, 65) if set(float32[:budget]) != set(float64[:budget])]
print(f"four positions: other trees for B = {differing}")

# %% [markdown]
# On the GPU one warp runs the search. Its frontier holds paths as links to nodes, so the tie rule walks up to where
# two paths meet:

# %%
show_source("tree_build.cu", "__device__ bool comes_before", "return a.rank < b.rank;\n}")

# %%
built = on_kernels(tree_build, root, log_probs, token_ids, BUDGET)
agree("tree_build, ties", [hand.tokens, hand.parents, hand.depths], [built.tokens, built.parents, built.depths])

# %% [markdown]
# ## Marginals of a real text
#
# Now with kdt16m, which stands for the target, and this text of a source file that it was not trained on. The drafter
# that DDTree is made for, DFlash, guesses all positions in one small pass. Here an honest stand-in does: the target
# itself with a memory of 16 tokens, writing greedily. It saves no time, but it guesses like a drafter: often right,
# sometimes sure of something wrong, and each position takes its own best guess for the previous ones for granted.

# %%
MEMORY, LENGTH, WIDTH = 16, 6, 8
bundle = folder() / "kdt16m" / "kdt16m-int4.kdtr"
engine = Engine.load(bundle, device="cpu")
prompts = json.loads((bundle.parent / "prompts.json").read_text(encoding="utf-8"))


def encode(prompt: dict) -> np.ndarray:
    return np.array(engine.tokenizer.encode(prompt["text"]).ids, np.int32)


def drafter_logits(text: np.ndarray) -> np.ndarray:
    return engine.generate(text[-MEMORY:], "ar", max_new_tokens=LENGTH, keep_logits=True).logits


def readable(tokens) -> list[str]:
    return [engine.tokenizer.decode([int(t)]).replace(" ", "␣").replace("\n", "↵") for t in tokens]


text = encode(prompts[38])
print("…", engine.tokenizer.decode(text)[-182:].strip())

# %% [markdown]
# `top_k` turns logits into log-probabilities, sorted. K = min(B, V) candidates a position would be enough for any
# tree; eight are plenty here. How sure is the drafter?

# %%
logits = drafter_logits(text)
log_probs, token_ids = sampling.top_k(logits, WIDTH)
for depth in range(LENGTH):
    guesses = zip(readable(token_ids[depth, :4]), np.exp(log_probs[depth, :4]), strict=True)
    print(f"depth {depth + 1}:", "  ".join(f"{guess:>10} {q:.2f}" for guess, q in guesses))

on_device = on_kernels(top_k, logits, WIDTH)
assert np.allclose(log_probs, device.host(on_device[0]), atol=1e-5), "exp and log round differently, by a hair"
agree("top_k", [token_ids], [on_device[1]])

# %% [markdown]
# Sure of the first three, then torn. The best tree follows: narrow where the drafter is sure, wide where it is not.

# %%
tree = specification.tree_build(text[-1], log_probs, token_ids, BUDGET)
built = on_kernels(tree_build, text[-1:], log_probs, token_ids, BUDGET)
agree("tree_build", [tree.tokens, tree.parents, tree.depths], [built.tokens, built.parents, built.depths])
labels = readable(tree.tokens)
SVG(tree_svg(labels, tree.parents))

# %% [markdown]
# The root, slot 0, is no guess. It is the last committed token, and its row is not in the cache yet, as it came out of
# the round before as the *bonus token*. So it runs with the drafts, and a pass has N = B + 1 rows. The budget B counts
# what is paid for guessing: with B = 0 the pass is one of plain decoding. Half of the public implementations count the
# root, half do not; ask whenever you read a budget.
#
# ## The mask
#
# All rows run in one pass, but they are not one text: `if` and `format` below the line break exclude each other. A row
# sees the committed prefix, its ancestors and itself. In a chain that is the usual triangle; and in the tree?

# %%
visible = specification.visibility(tree.parents)
slots = np.arange(BUDGET + 1, dtype=np.int32)
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained", width_ratios=(0.85, 1))
plotting.visibility(left, specification.visibility(slots - 1), [str(slot) for slot in slots]).set_title("a chain")
labelled = [f"{label}  {slot}" for slot, label in enumerate(labels)]
plotting.visibility(right, visible, labelled).set_title("the tree above")
plt.show()
print(f"{visible.sum()} pairs of {visible.size}, the row of slot 8 sees {np.flatnonzero(visible[8]).tolist()}")

# %% [markdown]
# The kernel needs no matrix. It has `parents`, and lists a row's keys by walking up, each into the place of its
# position. (In a text of several splits of 512 positions, `at` is the place in the current one.)

# %%
show_source("tree_attention.cu", "    for (int i = threadIdx.x; i < min(count", "slots[at] = prefix + node;")

# %% [markdown]
# ## One pass
#
# `Model.forward` runs any rows behind the cache's prefix. The tree first; then each node's path by itself, as a
# chain. Do a node's logits know that there were other nodes? The demand is equal *bits*, as a near tie could tip over
# in the last one.

# %%
prefix = LatentCache(engine.config, len(text) + BUDGET, engine.device)
prefill(engine.model, prefix, text[:-1])


def one_pass(engine: Engine, tokens: np.ndarray, parents: np.ndarray, depths: np.ndarray):
    """Logits of rows behind the prefix, and the cache with them in it."""
    put, cache = engine.device.put, LatentCache(engine.config, prefix.rows.shape[1], engine.device)
    cache.rows[:], cache.length[:] = put(prefix.rows), put(prefix.length)
    with engine.device.running():
        logits = engine.model.forward(put(tokens), put(parents), put(depths), cache).logits
    return engine.device.host(logits), cache


def alone(engine: Engine, path: np.ndarray) -> np.ndarray:
    return one_pass(engine, tree.tokens[path], slots[: len(path)] - 1, slots[: len(path)])[0]


# %%
verified, cache = one_pass(engine, tree.tokens, tree.parents, tree.depths)
paths = [path[path >= 0] for path in specification.ancestors(tree.parents)]
same = [np.array_equal(verified[path], alone(engine, path)) for path in paths]
print(f"{len(verified)} rows in one pass, {sum(same)} paths alone give the same bits")

# %%
kernel_engine = Engine.load(bundle, device=device.name)
on_device, device_cache = one_pass(kernel_engine, tree.tokens, tree.parents, tree.depths)
assert np.abs(on_device - verified).max() < 1e-3, "another order of sums, the same logits"
assert np.array_equal(on_device[paths[8]], alone(kernel_engine, paths[8])), (
    "the kernels' bits do not depend on the tree either"
)
agree("forward, tokens", [verified.argmax(axis=1)], [on_device.argmax(axis=1)])

# %% [markdown]
# Two faults lie near. A node's *position* is `prefix_len + depth`, as siblings stand at the same place of the text; a
# slot says where its row lies in the cache, and no more. Who takes slots for positions rotates the keys too far. And
# without the mask, a row reads its cousins as if they were text. What does each fault do to the logits?

# %%
faults = {
    "position by slot": (tree.tokens, tree.parents, slots),
    "every row before": (tree.tokens, slots - 1, tree.depths),
}
broken = {name: one_pass(engine, *columns)[0] for name, columns in faults.items()}
differences = {name: np.abs(logits - verified).max(axis=1) for name, logits in broken.items()}
figure, axes = plt.subplots(figsize=(8, 2.8), layout="constrained")
plotting.bars(axes, [f"{slot}\n{depth}" for slot, depth in zip(slots, tree.depths, strict=True)], differences)
axes.set(ylabel="max |Δ logit|", xlabel="slot, and below it the depth")
plt.show()
for name, logits in broken.items():
    changed = (logits.argmax(axis=1) != verified.argmax(axis=1)).sum()
    print(f"{name}: {changed} of {len(logits)} rows choose another token")

# %% [markdown]
# The first rows have the right bits: as long as slot and depth agree, all is well. So either fault passes every test
# with chains, and even in this tree most rows choose the right token. Only logits tell.
#
# ## The walk
#
# At each node the target's token is its argmax, the lowest id on ties. From the root, while a child carries that
# token, go there. The last token that no child carries is the bonus token, and it is free: the pass that found out
# that no guess was right has computed what is.

# %%
targets = verified.argmax(axis=1).astype(np.int32)
path, bonus = specification.tree_accept(tree.tokens, tree.parents, targets)
for node, token in zip(path, readable(targets[path]), strict=True):
    children = np.flatnonzero(tree.parents == node)
    print(f"slot {node:2}: the target says {token:8} children {' '.join(labelled[child] for child in children)}")

result = on_kernels(tree_accept, tree.tokens, tree.parents, targets, LENGTH + 1)
committed = np.array([*tree.tokens[path[1:]], bonus], np.int32)
agree("tree_accept", [path, committed, np.array([len(path)])], result)
SVG(tree_svg(labels, tree.parents, path, *readable([bonus])))

# %% [markdown]
# The drafter's favourite at depth 5 was wrong. A chain ends there; the tree goes on with the second candidate. One
# step later it ends as well: `=` may follow `format`, it makes no sense after `if`. The drafter's guess for depth 6 was
# meant for its own favourite, and the tree can only repeat it below every node of depth 5. That is the price of
# marginals, and the reason why a walk that has left the spine soon ends.

# %%
show_source("tree_accept.cu", "    while (true)", "node = next;\n    }")

# %% [markdown]
# ## The commit
#
# The pass has left all rows in the cache, node i at `prefix_len + i`. The accepted ones have to close up. By hand,
# with a prefix of three rows and the path 0, 2, 3, each row named by its content:

# %%
small = np.array([[[-3], [-2], [-1], [0], [1], [2], [3], [4]]], np.float32)  # [layers, capacity, features]
backwards = small.copy()
specification.cache_commit(after := small.copy(), 3, np.array([0, 2, 3]))
for j, node in reversed(list(enumerate([0, 2, 3]))):
    backwards[:, 3 + j] = backwards[:, 3 + node]
for name, rows in {"before": small, "after": after, "from the back": backwards}.items():
    print(f"{name:14}", " ".join(f"{'p' if x < 0 else ''}{abs(x):.0f}".rjust(3) for x in rows.ravel()))

# %% [markdown]
# Six rows count now, the last two are free. The third line shows the hazard: node 2 was overwritten by node 3 before
# it moved. A path ascends, so `path[j] ≥ j`, and from the front no row is overwritten before it was read. A kernel
# that moves rows in parallel would have to read all before it writes one. This one gives a thread a column instead:

# %%
show_source("cache_commit.cu", "    const int column", "size_t(path[j]) * features];")

# %% [markdown]
# Then the cache has to be the one that plain decoding leaves, in every bit, or the next round would start from
# something else.

# %%
cache.commit(path, np.array([len(path)], np.int32))
plain = LatentCache(engine.config, len(text) + BUDGET, engine.device)
prefill(engine.model, plain, np.concatenate([text[:-1], tree.tokens[path]]))
length = int(cache.length[0])
print(f"{length} rows, as after plain decoding: {np.array_equal(cache.rows[:, :length], plain.rows[:, :length])}")

expected_rows = device.host(device_cache.rows).copy()
specification.cache_commit(expected_rows, len(text) - 1, path)
on_kernels(cache_commit, device_cache.rows, device_cache.length, path, np.array([len(path)], np.int32))
agree("cache_commit", [expected_rows], [device_cache.rows])

# %% [markdown]
# ## What a budget buys
#
# Trees nest: that of B nodes is the beginning of that of B + 1. So one tree of 64 nodes tells everything about the
# smaller ones. Its expected drafts are the running sum of the probabilities; those that are accepted, the nodes of
# the walk that lie within the budget. Here both for 25 texts of five kinds, and for the chain, which ends at L.


# %%
def node_probabilities(tree: specification.DraftTree, log_probs: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    """Of each node's prefix; the root's is 1."""
    scores = np.zeros(len(tree.tokens))
    for node in range(1, tree.num_nodes):
        row = tree.depths[node] - 1
        (rank,) = np.flatnonzero(token_ids[row] == tree.tokens[node])
        scores[node] = scores[tree.parents[node]] + log_probs[row, rank]
    return np.exp(scores) * (tree.depths >= 0)


# %%
LARGEST = 64
widths, rows = {"tree": WIDTH, "chain": 1}, []
for prompt in prompts[:25]:
    text = encode(prompt)
    answer = np.array([*engine.generate(text, "ar", max_new_tokens=LENGTH).tokens, -2])
    marginals = sampling.top_k(drafter_logits(text), WIDTH)
    for kind, width in widths.items():
        narrow = [columns[:, :width] for columns in marginals]
        grown = specification.tree_build(text[-1], *narrow, LARGEST)
        hits = np.isin(np.arange(LARGEST + 1), accepted(grown, answer))
        rows.append((kind, node_probabilities(grown, *narrow)[1:].cumsum(), hits[1:].cumsum()))

# %%
means = {kind: np.mean([row[1:] for row in rows if row[0] == kind], axis=0) for kind in widths}
budgets = np.arange(1, LARGEST + 1)
figure, axes = plt.subplots(figsize=(8, 3.4), layout="constrained")
plotting.curves(axes, budgets, {f"{kind}, accepted": mean[1] for kind, mean in means.items()})
plotting.curves(axes, budgets, {f"{kind}, expected": mean[0] for kind, mean in means.items()}, ":")
axes.set(xlabel="node budget B", ylabel="drafts of a round, mean of 25 texts", ylim=(0, None))
plt.show()
for budget in (2, 6, 16, 64):
    print(f"B = {budget:2}:", ", ".join(f"{kind} {mean[1][budget - 1]:.2f}" for kind, mean in means.items()))

# %% [markdown]
# With few nodes the chain is as good: a second candidate costs a node of depth. But a chain is over after L nodes,
# and the tree goes on. It rises ever slower, as each node is less probable than the one before, so at some budget the
# next row costs more than it brings; where, depends on the machine.
#
# More is accepted than expected. The sum is exact for a text that is *drawn* from the marginals. This target is
# greedy: it takes its favourite each time, and that is the drafter's favourite more often than the probability says.
# The tree does not mind, it only asks which prefixes come first.
#
# ## Checks

# %%
best = [ranks for _, ranks in ranked_prefixes(3)[:BUDGET]]
assert hand.tokens[1:].tolist() == [ranks[-1] for ranks in best], "best-first search finds the best prefixes"
assert hand.depths[1:].tolist() == [len(ranks) for ranks in best], "in their order"
assert abs(expected - summed) < 1e-6, "a tree's expected drafts are the sum of its nodes' probabilities"
assert all(same) and len(same) == BUDGET + 1, "a row's logits have the same bits in the tree and alone"
assert all((rows[:5] == 0).all() and (rows[5:] > 0.1).all() for rows in differences.values()), "faults off the spine"
assert path.tolist() == [0, 1, 2, 3, 4, 8], "the walk leaves the spine at depth 5"
assert committed.tolist() == engine.generate(encode(prompts[38]), "ar", max_new_tokens=len(path)).tokens, (
    "a round commits what plain decoding writes"
)
assert np.array_equal(cache.rows[:, :length], plain.rows[:, :length]), "and leaves the cache of plain decoding"
assert after.ravel().tolist() == [-3, -2, -1, 0, 2, 3, 3, 4], "the accepted rows close up"
tree_gain, chain_gain = (means[kind][1] for kind in widths)
assert (np.diff(means["tree"][0], 2) < 1e-6).all(), "each node is expected to bring less than the one before"
assert tree_gain[15] > chain_gain[15] == chain_gain[LENGTH - 1], "a chain ends at L, a tree goes on"
print("all checks hold")

# %% [markdown]
# ## Try it
#
# 1. Give the second position of the hand example a uniform distribution. Where does the tree put its nodes now?
# 2. Let the answers of the last section be samples, `generate(..., temperature=1.0)`. Now less is accepted than
#    expected. What does that say about the drafter? Set `MEMORY` to 8 and to 32 as well.
# 3. Print the whole of `cache_commit.cu`, and write it with a thread for each accepted row instead. What has to lie
#    between its reads and its writes?
#
# ## Where next
#
# | | |
# |---|---|
# | [04 · Wiring the engine](04_engine_wiring.ipynb) | the forward pass that the tree went through |
