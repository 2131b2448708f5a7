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
# # 04 · Wiring the engine
#
# The reference model computes everything anew, from float weights, in full heads. The engine reads packed weights,
# keeps a latent cache and runs many rows at once. How does a file become logits here, how do we know in which layer
# the two part, and why does a token's result not depend, in any bit, on the tokens beside it?
#
# *You need* [03 · The reference model](03_reference_model.ipynb), or to know what MLA and a mixture of experts are.
#
# *You will learn* what is read from a bundle and when; where the engine decides between INT4 and float weights; to
# find a fault by its layer; what breaks row invariance, and what that could do to a text; what a token costs.
#
# *Runs in* about 30 s on a laptop, and half a minute more the first time, when kernels compile; GPU optional.

# %%
import inspect
import time
from collections import Counter
from unittest.mock import patch

import matplotlib.pyplot as plt
import numpy as np

from kdtree_nb import plotting
from kdtree_nb.bundle import Bundle
from kdtree_nb.engine import Engine
from kdtree_nb.engine import model as engine_model
from kdtree_nb.engine.cache import LatentCache
from kdtree_nb.engine.rounds import prefill
from kdtree_nb.engine.device import Device, cuda_available
from kdtree_nb.engine.weights import Weights
from kdtree_nb.golden import folder, load_cases
from kdtree_nb.kernels.dense_gemm import dense_gemm
from kdtree_nb.kernels.emulator.build import KernelError, find_compiler
from kdtree_nb.reference.linear import linear, tile
from kdtree_nb.reference.model import forward, hidden_states
from kdtree_nb.verify import logit_differences

plt.rcParams["figure.dpi"] = 120
BUNDLES = {
    "tiny, FP32": folder() / "tiny" / "tiny-fp32.kdtr",
    "tiny, INT4": folder() / "tiny" / "tiny-int4.kdtr",
    "kdt16m, INT4": folder() / "kdt16m" / "kdt16m-int4.kdtr",
}
engines = {label: Engine.load(path) for label, path in BUNDLES.items()}
golden = {label: load_cases(path.with_name(f"{path.stem}.golden.safetensors")) for label, path in BUNDLES.items()}
kdt16m, text = engines["kdt16m, INT4"], golden["kdt16m, INT4"][0].text


# %% [markdown]
# ## A bundle is opened, and nothing is read
#
# `Bundle.open` maps the file and checks its header: names, shapes, dtypes. A tensor is read when something asks for
# it. On the CPU this goes down to the single expert: one that no token has chosen stays on the disk. Watch a bundle
# while the engine reads a text, token by token.


# %%
class WatchedBundle(Bundle):
    """Remembers which tensors were read."""

    def __getitem__(self, name: str) -> np.ndarray:
        read.add(name)
        return super().__getitem__(name)


def bytes_read(token_ids: np.ndarray) -> list[int]:
    """Bytes read from the bundle: after opening, and after each token."""
    engine = Engine(WatchedBundle.open(kdt16m.bundle.path), None, 512, Device.named("cpu"))
    cache, sizes = LatentCache(engine.config, len(token_ids), engine.device), [0]
    for token in token_ids:
        row = np.zeros(1, np.int32)
        engine.model.forward(np.array([token], np.int32), row - 1, row, cache)
        cache.commit(row, row + 1)
        sizes.append(sum(engine.bundle.entries[name].nbytes for name in read))
    return sizes


curves = {}
for domain in ("stdlib", "kjv"):
    read: set[str] = set()
    words = (folder() / "kdt16m" / "heldout" / f"{domain}.txt").read_text(encoding="utf-8")[:400]
    curves[domain] = np.array(bytes_read(np.array(kdt16m.tokenizer.encode(words).ids[:40])))

# %%
figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
plotting.curves(axes, np.arange(41), {name: sizes / 1e6 for name, sizes in curves.items()}, ".-")
axes.axhline(kdt16m.bundle.nbytes / 1e6, color=plotting.QUIET, lw=1, ls="--", label="the whole bundle")
axes.set(xlabel="tokens run", ylabel="MB read", ylim=(0, None))
axes.legend(fontsize="small", loc="lower right", frameon=False)
plt.show()
print(f"after opening {curves['kjv'][0]}, after one token {curves['kjv'][1]:,} of {kdt16m.bundle.nbytes:,} bytes")

# %% [markdown]
# The first token needs attention, head and embedding, and in each of the 7 sparse layers its 4 experts of 16. Then
# new experts come in more and more slowly. For a checkpoint of 600 GB this is the difference between a start in
# seconds and none at all. The kernels read differently: they multiply all experts of a layer in one launch, so
# on a GPU the layer's experts are stacked there at its first use.
#
# ## One question in one place
#
# Which weights are INT4? The configuration does not say and the model does not ask. It calls `linear(x, name)`, and
# that looks into the bundle: is there a `name.qw`?

# %%
body = inspect.getsource(Weights.linear).split('"""')[2]
print(inspect.cleandoc(body))

# %% [markdown]
# Three lines, three cases: NumPy arrays go to the specification, whose weights are dequantised once; in a CUDA array
# or in the emulator a packed weight goes to the W4A16 kernel and any other to the dense one. Two names, such as gate
# and up, make one product. Here is what the first layer of `kdt16m` asks for, and for the second what comes before
# its experts.

# %%
calls, plain_linear = [], Weights.linear


def traced(self, x, *names):
    y = plain_linear(self, x, *names)
    kind = "INT4" if f"{names[0]}.qw" in kdt16m.bundle else "float"
    short = " + ".join(name.removeprefix("model.layers.").replace("self_attn.", "") for name in names)
    calls.append(f"{short:40} {x.shape[1]:5} → {y.shape[1]:5}  {kind}")
    return y


def run(engine: Engine, token_ids: np.ndarray):
    """Logits [tokens, vocab] and each layer's output [layers, tokens, hidden] of one pass over a text."""
    device, rows = engine.device, np.arange(len(token_ids), dtype=np.int32)
    with device.running():
        cache = LatentCache(engine.config, len(token_ids), device)
        chain = map(device.put, (token_ids, rows - 1, rows))
        out = engine.model.forward(*chain, cache, taps=range(engine.config.num_hidden_layers))
    return device.host(out.logits), device.host(out.features).swapaxes(0, 1)


with patch.object(Weights, "linear", traced):
    run(kdt16m, text[:1])
print(*calls[:9], sep="\n")

# %% [markdown]
# Not in the list is `kv_b_proj`: its halves are absorbed into queries and outputs, head by head, as notebook 03 showed.
# And the experts of a GPU run are one grouped product, `moe`, not a call each.
#
# An INT4 weight is not an approximation of something at this point. Its codes times its scales *are* the weight, so
# the packed product must give what a float product with the dequantised weight gives. Here even the bits agree,
# since both kernels share one order of summation.

# %%
name = "model.layers.0.mlp.down_proj"
x = np.random.default_rng(4).standard_normal((5, kdt16m.config.intermediate_size), np.float32)
dequantized = kdt16m.bundle.weight(name)
put, host = kdt16m.device.put, kdt16m.device.host
packed_product = host(kdt16m.model.weights.linear(put(x), name))
float_product = host(dense_gemm(put(x), put(dequantized)))
exact = x.astype(np.float64) @ dequantized.T.astype(np.float64)
print("INT4 and float kernel give the same bits:", np.array_equal(packed_product, float_product))

# %% [markdown]
# ## Layer by layer
#
# Engine and reference share neither the products nor the form of attention. Both return each layer's output, so
# where they part can be seen layer by layer. Three questions at once. How far is the engine from the reference, with
# FP32 and with INT4 weights? How far is INT4 from FP32, for comparison? And what would a fault look like? For that,
# one norm of `kdt16m`'s layer 4 is read wrong by 1 %.


# %%
def relative(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


class FaultyBundle(Bundle):
    """Reads one small vector wrong."""

    def __getitem__(self, name: str) -> np.ndarray:
        tensor = super().__getitem__(name)
        return (tensor * 1.01).astype(tensor.dtype) if name == "model.layers.4.post_attention_layernorm" else tensor


def layers(engine: Engine, token_ids: np.ndarray) -> list[np.ndarray]:
    logits, features = run(engine, token_ids)
    return [*features, logits]


def reference_layers(bundle: Bundle, token_ids: np.ndarray) -> list[np.ndarray]:
    weights = bundle.weights()
    _, *hidden = hidden_states(weights, bundle.config, token_ids)
    return [*hidden, forward(weights, bundle.config, token_ids)]


# %%
tiny_text = golden["tiny, FP32"][1].text
ours = {label: layers(engines[label], tiny_text) for label in ("tiny, FP32", "tiny, INT4")}
theirs = {label: reference_layers(engines[label].bundle, tiny_text) for label in ours}
tiny = {label: np.array(list(map(relative, ours[label], theirs[label]))) for label in ours}
tiny["INT4 against FP32"] = np.array(list(map(relative, theirs["tiny, INT4"], theirs["tiny, FP32"])))

faulty = Engine(FaultyBundle.open(kdt16m.bundle.path), None, 512, kdt16m.device)
expected = reference_layers(kdt16m.bundle, text)
large = {
    label: np.array(list(map(relative, layers(engine, text), expected)))
    for label, engine in (("kdt16m, INT4", kdt16m), ("a norm of layer 4 is 1 % off", faulty))
}

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained", sharey=True, width_ratios=(5, 9))
plotting.layer_differences(left, tiny).set(ylabel="max |difference| / max |value|")
plotting.layer_differences(right, large)
plt.show()

# %% [markdown]
# Sound curves stay at a few units of the last bit of float32, about 10⁻⁶, whatever the weights' format. What four
# bits cost lies 10⁵ times higher, so a tolerance between the two tells an error of arithmetic from an error
# of quantisation. A fault shows in the very layer that has it: the curve is sound up to there and jumps. A
# check of the logits alone would only say that something is wrong.
#
# ## Token by token
#
# The same comparison along the text: the golden files hold the logits that the reference gave for each new token.

# %%
differences = {}
for label, engine in engines.items():
    case = golden[label][0]
    generation = engine.generate(case.prompt, "ar", max_new_tokens=len(case.tokens), keep_logits=True)
    differences[label] = logit_differences(case, generation)
leads = {label: np.diff(np.sort(golden[label][0].logits, axis=1)[:, -2:]).min() for label in differences}

# %%
figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
plotting.logit_differences(axes, differences).set(ylim=(1e-7, 1e-2))
axes.axhline(1e-3, color=plotting.QUIET, lw=1, ls="--")
axes.annotate("asked of every token", (24, 1e-3), xytext=(0, 3), textcoords="offset points", ha="right", fontsize=8)
plt.show()
for label, lead in leads.items():
    print(f"{label:13} narrowest lead of the best logit over the second: {lead:.4f}")

# %% [markdown]
# No drift: the cache holds what the tokens' own passes computed, and errors do not feed on each other. As long as the
# differences are far smaller than the lead of the best token, both write the same text. The prompts of the golden
# files were chosen for a lead of at least 0.002, so that the test gives the same answer on every machine. Texts in the
# wild come with no such promise.
#
# ## A row alone, a row in company
#
# Speculative decoding checks many tokens in one pass and claims the text of plain decoding, where each token runs
# alone. The argument is airtight if a row's logits are the same in both. Mathematically they are. In floating point
# a sum depends on its order, and fast libraries choose the order by the *shape* of the product. Three ways to
# compute the same thing:
#
# - **tiles**, what the specification does: every call to BLAS has one shape, 4 rows by 64 outputs;
# - **BLAS**: `x @ W.T`, which picks its path by the number of rows;
# - **split**: what fast GPU kernels do. With few rows they cut the sum into pieces to keep the chip busy, with many
#   rows they don't. The simple sums of `einsum` stand in for the kernel, so that nothing but the split changes.


# %%
def untiled(weight) -> np.ndarray:
    *stack, _, in_features, _ = weight.values.shape
    return weight.values.swapaxes(-1, -2).reshape(*stack, -1, in_features)[..., : weight.out_features, :]


def blas(x, weight):
    return x @ untiled(weight).swapaxes(-1, -2)


def split(x, weight):
    pieces = 8 if x.shape[-2] < 8 else 1
    parts = zip(np.split(x, pieces, axis=-1), np.split(untiled(weight), pieces, axis=-1), strict=True)
    return sum(np.einsum("...ri,...oi->...ro", a, b) for a, b in parts)


PRODUCTS = {"tiles": linear, "BLAS": blas, "split": split}
weight = tile(kdt16m.bundle.weight("model.layers.0.mlp.gate_proj"))
x = np.random.default_rng(5).standard_normal((24, kdt16m.config.hidden_size), np.float32)
changed = {
    label: np.array([(product(x[:rows], weight)[0] != product(x[:1], weight)[0]).mean() for rows in range(1, 25)])
    for label, product in PRODUCTS.items()
}

# %% [markdown]
# How much of the first row's result changes in some bit as other rows join it? And what becomes of it behind 8
# layers, in the logits of a text that runs once in one pass and once token by token?


# %%
def one_by_one(engine: Engine, token_ids: np.ndarray) -> np.ndarray:
    """Logits [tokens, vocab] of a text whose tokens run alone, each behind the cache of those before."""
    device, rows = engine.device, []
    with device.running():
        cache = LatentCache(engine.config, len(token_ids), device)
        for token in token_ids:
            root, parent, depth, one = (device.put(np.array([n], np.int32)) for n in (token, -1, 0, 1))
            rows.append(device.host(engine.model.forward(root, parent, depth, cache).logits)[0])
            cache.commit(depth, one)
    return np.array(rows)


on_cpu, apart = Engine.load(kdt16m.bundle.path, "cpu"), {}
for label, product in PRODUCTS.items():
    with patch("kdtree_nb.engine.weights.linear", product):
        together, alone = run(on_cpu, text[:32])[0], one_by_one(on_cpu, text[:32])
    apart[label] = np.abs(together - alone).max(axis=1)

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
plotting.curves(left, np.arange(1, 25), {label: 100 * share for label, share in changed.items()}, ".-")
left.set(xlabel="rows in the product", ylabel="% of the first row's results changed", ylim=(-3, 103))
plotting.curves(right, np.arange(1, 33), apart, ".-").margins(y=0.3)
right.set(xlabel="token of the text", ylabel="max |Δ logit|, in one pass − alone")
plt.show()
for label in ("tiles", "split"):
    verdict = "the same bits" if not changed[label].any() and not apart[label].any() else "other bits"
    print(f"{label}: {verdict}")

# %% [markdown]
# Tiles: zero, in every bit, for every number of rows. The split changes with the 8th row, by construction. What BLAS
# does depends on the library and the processor: the curve is of the machine that made this page, and yours may show
# another or none. An engine that stands on it is exact on some machines, with some numbers of rows.
#
# Does 10⁻⁵ in a logit matter? Where the best token leads by less, it does. How often is that?

# %%
gaps = []
for domain in ("stdlib", "docs", "shakespeare", "kjv"):
    words = (folder() / "kdt16m" / "heldout" / f"{domain}.txt").read_text(encoding="utf-8")[:2000]
    logits, _ = run(kdt16m, np.array(kdt16m.tokenizer.encode(words).ids[:200], np.int32))
    gaps.append(np.diff(np.sort(logits, axis=1)[:, -2:])[:, 0])
gaps = np.sort(np.concatenate(gaps))

# %%
figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
density, reach = (gaps < 0.5).mean() / 0.5, np.geomspace(1e-6, 10, 50)
axes.loglog(gaps, np.arange(1, len(gaps) + 1) / len(gaps), ".", ms=3, color=plotting.INK, label="800 held-out tokens")
axes.loglog(reach, np.minimum(density * reach, 1), color=plotting.ACCENTS[1], lw=1.2, label="constant density")
axes.axvline(1e-5, color=plotting.QUIET, lw=1, ls="--", label="differences above")
axes.set(xlabel="lead of the best logit over the second", ylabel="share of tokens below", ylim=(1e-7, 2))
axes.legend(fontsize="small", frameon=False)
plt.show()
print(f"one token in about {round(1 / (density * 1e-5), -5):,.0f} leads by less than 0.00001")

# %% [markdown]
# Leads have no gap at zero. The share of tokens below a small lead is proportional to it, so with differences of 10⁻⁵
# one token in some hundred thousand is open to a flip. After a flip the texts go different ways: no test of a few
# prompts finds it, and no user can reproduce it. Where logits are rounded to bfloat16, one near 10 is off by up
# to 0.03, and the same line gives one token in a hundred. Row invariance takes the question away, for any precision.
#
# The kernels are built the same way. Here is the experiment with the real CUDA sources, on the GPU if there is one
# and in the emulator if there is a compiler, and with a third company: a draft tree, where each token of the text has
# a wrong sibling beside it.


# %%
def in_a_tree(engine: Engine, token_ids: np.ndarray) -> np.ndarray:
    """Logits [tokens, vocab] of a text that runs as the right branch of a tree; the wrong siblings come first."""
    count, device = len(token_ids), engine.device
    tokens = np.array([token_ids[0], *np.stack([token_ids[1:] ^ 1, token_ids[1:]], axis=1).ravel()], np.int32)
    depths = np.array([0, *np.repeat(np.arange(1, count), 2)], np.int32)
    parents = np.where(depths > 0, 2 * (depths - 1), -1).astype(np.int32)
    with device.running():
        cache = LatentCache(engine.config, len(tokens), device)
        return device.host(engine.model.forward(*map(device.put, (tokens, parents, depths)), cache).logits)[::2]


devices = ["cpu", *["cuda"] * cuda_available()]
try:
    find_compiler()
    devices.append("emulated")
except KernelError:
    pass  # the notebook goes on without
invariant = {}
for device in devices:
    tiny_engine = Engine.load(BUNDLES["tiny, INT4"], device)
    alone, ten = one_by_one(tiny_engine, tiny_text[:10]), tiny_text[:10]
    invariant[device] = all(np.array_equal(alone, way(tiny_engine, ten)) for way in (lambda *a: run(*a)[0], in_a_tree))
print("alone, in a prompt and in a tree, the same bits:", all(invariant.values()))

# %% [markdown]
# ## What a token costs
#
# A token does one multiplication and one addition with each weight it meets; of the experts it meets only its own.
# Decoding one token reads each of these weights once, so bytes are what it waits for on a GPU.

# %%
PARTS = {"self_attn": "attention", "lm_head": "head", ".experts.": "experts", "mlp": "other MLP"}
config, met = kdt16m.config, Counter()
for row in kdt16m.bundle.rows():
    share = config.num_experts_per_tok / config.n_routed_experts if ".experts." in row.name else 1
    if len(row.shape) == 2 and "embed" not in row.name:
        part = next(part for word, part in PARTS.items() if word in row.name)
        met[part, "weights"] += share * np.prod(row.shape)
        met[part, "bytes"] += share * row.bytes
for part in PARTS.values():
    print(f"{part:10} {met[part, 'weights']:9,.0f} multiply-adds a token, {met[part, 'bytes']:9,.0f} bytes read")

# %% [markdown]
# On the CPU it is another story: NumPy multiplies in float32, and a small model spends its time between the
# products. Products and attention are timed where they are
# called; the rest is what is left over.

# %%
spent: Counter[str] = Counter()


def timed(function, kind_of):
    def wrapper(*args, **options):
        started = time.perf_counter()
        result = function(*args, **options)
        spent[kind_of(args)] += time.perf_counter() - started
        return result

    return wrapper


def by_name(args):
    part = next(part for word, part in PARTS.items() if word in args[2])
    return {"attention": "attention's products", "experts": "experts"}.get(part, "other MLP, head")


attention = timed(engine_model.tree_attention, lambda _: "attention")
products = {"linear": timed(Weights.linear, by_name), "heads": timed(Weights.heads, lambda _: "attention's products")}

# %%
parts = {}
for rows in (1, 17):
    cache = LatentCache(config, len(text), on_cpu.device)
    prefill(on_cpu.model, cache, text[:38])
    chain = text[38 : 38 + rows], np.arange(rows, dtype=np.int32) - 1, np.arange(rows, dtype=np.int32)
    on_cpu.model.forward(*chain, cache)  # whatever is loaded late is there now
    spent.clear()
    started = time.perf_counter()
    with patch.object(engine_model, "tree_attention", attention), patch.multiple(Weights, **products):
        for _ in range(8):
            on_cpu.model.forward(*chain, cache)
    spent["norms, RoPE, router, glue"] = time.perf_counter() - started - spent.total()
    parts[f"{rows} row{'s'[: rows - 1]}"] = {kind: 1000 * seconds / 8 for kind, seconds in spent.most_common()}

# %% tags=["nbval-ignore-output"]
figure, axes = plt.subplots(figsize=(10, 2.6), layout="constrained")
plotting.shares(axes, parts, "ms a pass on the machine that made this page")
plt.show()

# %% [markdown]
# 17 rows take nothing like 17 times as long, as most calls cost the same for one row and for four. But experts grow, as
# 17 tokens choose more of them than one. On a GPU this growth is what a draft tree pays for, since every further
# expert is read from memory. [02 · The W4A16 kernel](02_w4a16_kernel.ipynb) does the arithmetic.
#
# ## Checks

# %%
experts = sum(row.bytes for row in kdt16m.bundle.rows() if ".experts." in row.name)
assert curves["kjv"][0] == 0, "opening a bundle reads no tensor"
assert kdt16m.bundle.nbytes - curves["kjv"][1] == experts * 12 // 16, "after a token, 12 experts of 16 are on the disk"
assert np.array_equal(packed_product, float_product), "an INT4 product is the product with the dequantised weight"
assert relative(packed_product, exact) < 1e-6, "and right to float32's last bits"
assert max(tiny["tiny, FP32"].max(), tiny["tiny, INT4"].max(), large["kdt16m, INT4"].max()) < 1e-5, (
    "engine and reference agree in every layer, whatever the weights' format"
)
assert tiny["INT4 against FP32"].min() > 1e-3, "what four bits cost is far above that"
fault = large["a norm of layer 4 is 1 % off"]
assert fault[:4].max() < 1e-5 < 1e-4 < fault[4:].min(), "a fault shows in its layer and after it, not before"
assert all(values.max() <= 1e-3 for values in differences.values()), "no token's logits are off by more than is allowed"
assert not changed["tiles"].any() and not apart["tiles"].any(), "with tiles a row's bits never depend on its company"
assert changed["split"].any() and apart["split"].any(), "with a split by the number of rows they do"
assert all(invariant.values()), f"the kernels are row-invariant on {', '.join(invariant)}"
print("all checks hold")

# %% [markdown]
# ## Try it
#
# 1. Let `FaultyBundle` spoil other tensors: an expert's scales, or `e_score_correction_bias`. Does the jump always lie
#    in the right layer, and is it always there?
# 2. Write a fourth product that is row-invariant without BLAS, such as one `einsum` for everything. What does it cost?
# 3. Let `split` use the same number of pieces for every number of rows. Which curve becomes zero, and what does the
#    engine then owe to the number 8?
#
# ## Where next
#
# | | |
# |---|---|
# | [02 · The W4A16 kernel](02_w4a16_kernel.ipynb) | the product behind `linear`, from a plain loop to what is shipped |
# | [03 · The reference model](03_reference_model.ipynb) | what the engine is held against |
#
# Horace He and others, *Defeating Nondeterminism in LLM Inference* (Thinking Machines Lab, 2025), describes the same
# condition for servers: there it is the other users' rows that change a result.
