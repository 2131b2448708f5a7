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
# # 00 · Quickstart
#
# From a file to text, in three ways that give the same text. One of them runs the model once for each token. The
# other two guess ahead and let the model check several guesses at once. How much does that save, and why does it
# change nothing?
#
# *You need* an environment with this package; `python -m kdtree_nb doctor` says whether yours is complete.
#
# *You will learn* to open a bundle, to generate, to see what a round of draft-tree decoding does, and to check an
# installation against the golden files.
#
# *Runs in* about 30 s on a laptop; GPU optional.

# %%
import json

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import HTML

from kdtree_nb import plotting
from kdtree_nb.engine import Engine
from kdtree_nb.golden import folder, load_cases
from kdtree_nb.reference.tree import tree_accept
from kdtree_nb.verify import verify_bundle

plt.rcParams["figure.dpi"] = 120

# %% [markdown]
# ## A bundle
#
# A KDTR bundle is a safetensors file with the model's configuration in it. This one holds `kdt16m`, a model of 16
# million weights that was trained for this repository on Python code, manuals, Shakespeare and the King James Bible.
# Its architecture is that of DeepSeek-V3 and Kimi K2, its MLPs are stored in four bits a weight. A bundle shows
# itself:

# %%
bundle = folder() / "kdt16m" / "kdt16m-int4.kdtr"
engine = Engine.load(bundle)
HTML(engine.bundle._repr_html_())

# %% [markdown]
# ## Text
#
# `decoder="ar"` is plain decoding: each token costs one pass of the model, each pass gives one token. Let the model
# continue a class.

# %%
prompt = '''class Point:
    """A point in the plane."""

    def __init__(self, x, y):
        self.x = x
        self.y = y

    def __add__(self, other):
        return Point(self.x + other.x, self.y + other.y)

    def __sub__(self, other):'''

plain = engine.generate(prompt, decoder="ar", max_new_tokens=64)
print(plain.text)

# %% [markdown]
# It knows Python's form better than its meaning, and soon repeats itself: that is what 16 million weights are good
# for. The architecture and the bits are those of the large models, and that is what matters here.
#
# ## The same text, sooner
#
# On a GPU a pass over ten tokens takes hardly longer than a pass over one, since both read all the weights. So let
# something cheap guess the next tokens, and let the model read all guesses in one pass. Wherever a guess is what the
# model itself would have written, it is kept. `chain` guesses one continuation, `ddtree` a tree of them, and the
# first wrong guess ends the round with the model's own token in its place. So each pass yields at least one token,
# and the text is the one of plain decoding.
#
# The guesses come from a *drafter*: a small network beside the bundle, trained for this model, that reads the model's
# own hidden states and guesses the next seven tokens at once. [06](06_ddtree_decoding.ipynb) is about it.

# %% tags=["nbval-ignore-output"]
DECODERS = ("ar", "chain", "ddtree")
runs = {decoder: engine.generate(prompt, decoder, node_budget=16, max_new_tokens=64) for decoder in DECODERS}
for decoder, run in runs.items():
    same = "the same tokens" if run.tokens == plain.tokens else "OTHER tokens"
    print(
        f"{decoder:7} {len(run.tokens)} tokens, {run.target_forwards:2} passes, τ = {run.acceptance_length:.2f}, {same}"
    )

# %% [markdown]
# τ, the *acceptance length*, is the number of tokens per pass. How is it spread over the rounds?

# %%
accepted = {decoder: [r.accepted for r in run.rounds] for decoder, run in runs.items()}
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
plotting.tokens_over_forwards(left, accepted)
plotting.accepted_per_round(right, accepted).set(xlim=(0, 16), xticks=range(0, 17, 2))
plt.show()

# %% [markdown]
# Where the text repeats itself every guess is right, and the drafter's seven positions are the limit. How do other
# texts fare, early on? Here is one held-out text for each kind that the model was trained on, and the passes that its
# next 32 tokens take.

# %%
prompts = json.loads((bundle.parent / "prompts.json").read_text(encoding="utf-8"))
held_out = {}
for entry in prompts:
    held_out.setdefault(entry["domain"], entry["text"])
passes = {decoder: [] for decoder in ("chain", "ddtree")}
for text in held_out.values():
    for decoder, counts in passes.items():
        counts.append(engine.generate(text, decoder, node_budget=16, max_new_tokens=32).target_forwards)

# %% tags=["nbval-ignore-output"]
figure, axes = plt.subplots(figsize=(8, 2.8), layout="constrained")
plotting.bars(axes, list(held_out), {decoder: np.array(counts) for decoder, counts in passes.items()})
axes.axhline(32, color=plotting.QUIET, lw=1, ls="--")
axes.annotate("plain decoding", (0, 32), xytext=(0, 3), textcoords="offset points", fontsize="small")
axes.set(ylabel="passes for 32 tokens", ylim=(0, 42))
plt.show()
print(passes)

# %% [markdown]
# Five texts are no measurement, and small differences among them say nothing. [06](06_ddtree_decoding.ipynb) has one,
# of sixty texts, and asks what a pass costs, too.
#
# ## One round
#
# What does the model check in a round? Here is the fourth of the class above, step by step. The drafter gives, for
# each of the next positions, its candidates and their probabilities. The tree of the `node_budget` most probable
# continuations is built from them; its root is the last token of the text. One pass computes the model's choice after
# *every* node: each node attends to the text and to its own ancestors, not to its cousins. Then walk from the root as
# long as a child is the model's choice. (The walk meets only nodes that continue the text as the model does. So the
# choices that matter are known by now, from plain decoding, and the cell reads them off.)

# %%
rounds = []
engine.generate(prompt, "ddtree", 16, 64, on_round=lambda tree, path: rounds.append((tree, path)))
number = 3
start = sum(len(path) for _, path in rounds[:number])  # tokens that were committed before
tree, accepted_path = rounds[number]

choices = np.array(plain.tokens)[start + tree.depths]
path, bonus = tree_accept(tree.tokens, tree.parents, choices)

# %% tags=["nbval-ignore-output"]
readable = [engine.tokenizer.decode([token]).replace(" ", "␣").replace("\n", "↵") for token in [*tree.tokens, bonus]]
figure, axes = plt.subplots(figsize=(10, 4), layout="constrained")
plotting.draft_tree(axes, readable[:-1], tree.parents, path, readable[-1])
plt.show()
print(f"{len(path) - 1} of {tree.num_nodes - 1} drafted tokens accepted, then the bonus token {readable[-1]!r}")

# %% [markdown]
# The path and the bonus token are exactly what plain decoding writes there. Nothing in this argument depends on the
# drafter: a bad one costs time, never truth. There is one condition, and it is stricter than it looks. The model's
# logits for a token must not depend, not even in the last bit, on what other rows were in the pass, or a near tie
# could tip over. The engine is built for that, and the checks below demand equal bits.
#
# ## Samples
#
# At temperature 0 the model's choice is its most probable token. Above 0 it is a sample, drawn at each node with a
# random number that belongs to the position. The same walk then gives the very sample that plain decoding would have
# drawn.

# %%
sampled = {
    decoder: engine.generate(prompt, decoder, max_new_tokens=48, temperature=0.7, seed=3)
    for decoder in ("ar", "ddtree")
}
print(sampled["ddtree"].text)
print(f"{'-' * 40}\nthe same samples: {sampled['ar'].tokens == sampled['ddtree'].tokens}")

# %% [markdown]
# ## Time
#
# In NumPy a pass over many rows costs more than a pass over one, so fewer passes need not mean less time. What the
# machine that ran this notebook made of it:

# %% tags=["nbval-ignore-output"]
for decoder, run in runs.items():
    print(f"{decoder:7} {run.tokens_per_second:6.1f} tokens/s")

# %% [markdown]
# ## Is this installation right?
#
# Each bundle of the repository has a golden file beside it: prompts, and the tokens and logits that the specification
# gives for them. `python -m kdtree_nb verify` holds the engine against all of them, and so does this cell for one.
# For that the drafter is an oracle, which knows the answer and errs on purpose. Then the trained drafter is held
# against its own specification, and helps to write 64 tokens of each kind of text.

# %% tags=["nbval-ignore-output"]
golden = bundle.with_name("kdt16m-int4.golden.safetensors")
checks = list(verify_bundle(bundle, load_cases(golden), new_tokens=64))
print(*checks, sep="\n")

# %% [markdown]
# ## Checks

# %%
assert all(check.passed for check in checks), "the engine is what the specification says"
for decoder, run in runs.items():
    assert run.tokens == plain.tokens, f"{decoder} writes what plain decoding writes"
    assert sum(r.accepted + 1 for r in run.rounds) == len(plain.tokens), (
        "each pass commits its drafts and a bonus token"
    )
assert runs["ddtree"].target_forwards < runs["ar"].target_forwards, "with fewer passes"
expected = plain.tokens[start : start + len(path)]
assert [*tree.tokens[path[1:]], bonus] == expected, "the walk above commits what plain decoding writes there"
assert path.tolist() == accepted_path.tolist(), "and is the walk of the engine"
assert sampled["ar"].tokens == sampled["ddtree"].tokens, "samples are the same too"
print("all checks hold")

# %% [markdown]
# ## Try it
#
# 1. Set `node_budget` to 4 and to 64. What happens to τ, and why does it level off?
# 2. Give the engine a prompt that repeats itself, such as a list of similar lines. How large can τ become?
# 3. Write a drafter: a subclass of `Drafter` with `propose(tokens)`, which returns a `Proposal`: log-probabilities
#    and token ids of the next positions. Let it always guess the ten most frequent tokens. Pass it as `drafter=` and
#    check that the text stays.
#
# ## Where next
#
# | | |
# |---|---|
# | [01 · Weights of four bits](01_quantization.ipynb) | what lies in an INT4 weight, and what the rounding costs |
# | [02 · The W4A16 kernel](02_w4a16_kernel.ipynb) | how a GPU multiplies by such weights |
# | [03 · The reference model](03_reference_model.ipynb) | DeepSeek-V3's forward pass, step by step |
# | [04 · Wiring the engine](04_engine_wiring.ipynb) | the same model from packed weights, with a cache |
# | [05 · Draft trees](05_draft_trees.ipynb) | how the tree of a round is chosen, checked and committed |
# | [06 · DDTree decoding](06_ddtree_decoding.ipynb) | what trees bring on texts nobody has seen, and what they cost |
# | [07 · Performance](07_performance.ipynb) | where the time goes on a GPU, beside floors and other people's kernels |
# | [08 · Real checkpoints](08_real_checkpoints.ipynb) | Hugging Face folders in and out, up to Kimi K2 |
