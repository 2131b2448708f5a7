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
# # 03 · The reference model
#
# DeepSeek-V3 and Kimi K2 share one architecture: attention over a compressed cache, and a mixture of experts. This
# notebook walks through its forward pass on a trained model, in NumPy. How does a token become the next, what of it
# is kept, and how do we know that the pass is right to the last detail?
#
# *You need* what attention and a softmax are. [01 · Weights of four bits](01_quantization.ipynb) explains where the
# weights come from.
#
# *You will learn* multi-head latent attention (MLA) and the size of its cache; why its absorbed form is the same
# function; interleaved RoPE and YaRN; what the router's bias does; and which faults a careless test never sees.
#
# *Runs in* about 20 s on a laptop; no GPU is used.

# %%
import dataclasses
from unittest.mock import patch

import matplotlib.pyplot as plt
import numpy as np
from golden import make_parity
from tokenizers import Tokenizer

from kdtree_nb import plotting
from kdtree_nb.bundle import Bundle
from kdtree_nb.config import YarnScaling
from kdtree_nb.golden import folder
from kdtree_nb.reference import model
from kdtree_nb.reference.moe import moe_route
from kdtree_nb.reference.norm import LATENT_EPS, rms_norm
from kdtree_nb.reference.rope import apply_rope, rope, softmax_scale
from kdtree_nb.reference.sampling import log_softmax

plt.rcParams["figure.dpi"] = 120
bundle = Bundle.open(folder() / "kdt16m" / "kdt16m-int4.kdtr")
config, weights = bundle.config, bundle.weights()  # float32 values, INT4 ones dequantised
tokenizer = Tokenizer.from_file(str(bundle.path.with_name(bundle.tokenizer)))
texts = {
    file.stem: file.read_text(encoding="utf-8") for file in sorted((folder() / "kdt16m" / "heldout").glob("*.txt"))
}

# %% [markdown]
# ## The whole pass
#
# A token's embedding passes through the layers. Each adds two things to it: what attention gathers from earlier
# tokens, and what an MLP makes of the sum. A last norm and the head turn the result into a logit for each token of
# the vocabulary. That is all of it; `model.attention`, `model.mlp` and `model.experts` are opened below.


# %%
def walk(token_ids: np.ndarray, dtype: type = np.float32):
    """The forward pass, and what enters attention and MLP in each layer."""
    hidden, steps = weights["model.embed_tokens"][token_ids].astype(dtype), []
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}."
        own = {name.removeprefix(at): w.astype(dtype) for name, w in weights.items() if name.startswith(at)}
        x = rms_norm(hidden, own["input_layernorm"], config.rms_norm_eps)
        hidden = hidden + model.attention(own, config, x)
        y = rms_norm(hidden, own["post_attention_layernorm"], config.rms_norm_eps)
        hidden = hidden + (model.mlp(own, "mlp", y) if config.is_dense(layer) else model.experts(own, config, y))
        steps.append((own, x, y))
    final = rms_norm(hidden, weights["model.norm"].astype(dtype), config.rms_norm_eps)
    return final @ weights["lm_head"].astype(dtype).T, steps


# %% [markdown]
# What does the model make of a text that it has not seen? Here is what each token of one costs: the bits of surprise,
# −log₂ of the probability that the model gave it.

# %%
ids = np.array(tokenizer.encode(texts["kjv"]).ids[:128])
logits, steps = walk(ids)
bits = -log_softmax(logits)[np.arange(len(ids) - 1), ids[1:]] / np.log(2)

readable = [tokenizer.decode([token]).replace("\n", "↵").replace(" ", "␣") for token in ids]
figure, axes = plt.subplots(figsize=(10, 2.9), layout="constrained")
plotting.surprise(axes, readable[1:49], bits[:48])
plt.show()

# %% [markdown]
# A name is expensive where it comes and cheap where it must come; the second half of a word that has begun costs next
# to nothing.
#
# ## Attention that keeps a sketch
#
# Ordinary attention keeps each head's keys and values of every token. MLA keeps one *latent* instead, `kv_lora`
# numbers, and a small key that carries the position. Each head's keys and values are linear functions of the latent,
# written in `kv_b_proj`, and could be computed anew at any time.

# %%
own, x, _ = steps[3]
compressed = x @ own["self_attn.kv_a_proj_with_mqa"].T
latent = rms_norm(compressed[:, : config.kv_lora_rank], own["self_attn.kv_a_layernorm"], LATENT_EPS)
k_rope = apply_rope(compressed[:, config.kv_lora_rank :], np.arange(len(x)), rope(config))
per_head = own["self_attn.kv_b_proj"].reshape(config.num_attention_heads, -1, config.kv_lora_rank)
keys_values = np.einsum("tc,hdc->thd", latent, per_head)
print(f"kept         latent {list(latent.shape)} and rotated key {list(k_rope.shape)}")
print(f"computable   keys and values of all heads {list(keys_values.shape)}")

# %% [markdown]
# How much smaller is the cache? For this model, for Moonlight-16B and for Kimi K2, per token and over all layers.

# %%
models = {  # layers, heads, nope, rope, v, kv_lora
    "kdt16m": (8, 8, 32, 16, 32, 64),
    "Moonlight-16B-A3B": (27, 16, 128, 64, 128, 512),
    "Kimi K2": (61, 64, 128, 64, 128, 512),
}
full = {name: 2 * layers * heads * (nope + r + v) for name, (layers, heads, nope, r, v, _) in models.items()}
kept = {name: 2 * layers * (kv_lora + r) for name, (layers, _, _, r, _, kv_lora) in models.items()}

figure, axes = plt.subplots(figsize=(8, 2.6), layout="constrained")
plotting.cache_per_token(axes, full, kept)
plt.show()
for name in models:
    gib = kept[name] * 2**17 / 2**30
    print(f"{name:18} {full[name]:9,} to {kept[name]:6,} bytes a token; 131,072 tokens take {gib:.2f} GiB")

# %% [markdown]
# ## The absorbed form
#
# Computing keys and values anew for each new token would be absurdly slow. There is no need. A score is a product of
# three factors, query · `W_UK` · latent, and the product may be taken from the left: the query goes through `W_UK`
# once, and then meets the latents themselves. On the way out it is the same, the mixture of latents goes through
# `W_UV` once:
#
# $$ q^\top (W_{UK}\, c_t) = (W_{UK}^\top q)^\top c_t \qquad \sum_t p_t\, (W_{UV}\, c_t) = W_{UV} \sum_t p_t\, c_t $$
#
# This is the *absorbed* form. It is attention with one key head and one value head, both of them the cache. The
# engine and its kernels compute this; the reference computes the other; so each can convict the other.


# %%
def absorbed_attention(own: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    nope, positions = config.qk_nope_head_dim, np.arange(len(x))
    q_latent = rms_norm(x @ own["self_attn.q_a_proj"].T, own["self_attn.q_a_layernorm"], LATENT_EPS)
    queries = (q_latent @ own["self_attn.q_b_proj"].T).reshape(len(x), -1, config.qk_head_dim)
    compressed = x @ own["self_attn.kv_a_proj_with_mqa"].T
    latent = rms_norm(compressed[:, : config.kv_lora_rank], own["self_attn.kv_a_layernorm"], LATENT_EPS)
    rotated = [
        apply_rope(r, positions, rope(config)) for r in (queries[..., nope:], compressed[:, config.kv_lora_rank :])
    ]
    per_head = own["self_attn.kv_b_proj"].reshape(config.num_attention_heads, -1, config.kv_lora_rank)

    absorbed = np.einsum("thd,hdc->thc", queries[..., :nope], per_head[:, :nope])  # through W_UK, once a token
    scores = np.einsum("qhc,kc->hqk", absorbed, latent) + np.einsum("qhr,kr->hqk", *rotated)
    scores = np.where(np.tri(len(x), dtype=bool), scores * softmax_scale(config), -np.inf)
    mixed = np.einsum("hqk,kc->qhc", np.exp(log_softmax(scores)), latent)
    values = np.einsum("thc,hdc->thd", mixed, per_head[:, nope:])  # through W_UV, once a token
    return values.reshape(len(x), -1) @ own["self_attn.o_proj"].T


# %%
_, steps64 = walk(ids, np.float64)
deviations = [np.abs(absorbed_attention(own, x) - model.attention(own, config, x)).max() for own, x, _ in steps64]
print(f"absorbed = naive in float64, largest difference below 1e-12: {max(deviations) < 1e-12}")

# %% [markdown]
# What does absorption cost, and what does it spare? Count the multiply-adds of one new token in one layer of Kimi K2,
# over the length of its context: with full heads in the cache, with latents that are expanded for every token, and
# absorbed.

# %%
_, heads, nope, r, v, kv_lora = models["Kimi K2"]
context = np.geomspace(64, 131072, 100)
expansion = heads * (nope + v) * kv_lora  # a token's keys and values from its latent, or its query's absorption
work = {
    "absorbed": expansion + context * heads * (2 * kv_lora + r),
    "full heads cached": expansion + context * heads * (nope + r + v),
    "latents expanded": context * (expansion + heads * (nope + r + v)),
}
traffic = {"absorbed": context * (kv_lora + r) * 2, "full heads cached": context * heads * (nope + r + v) * 2}

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
plotting.curves(left, context, work).set(ylabel="multiply-adds", title="arithmetic")
plotting.curves(right, context, traffic).set(ylabel="bytes", title="cache read")
for axes in (left, right):
    axes.set(xlabel="context [tokens]", xscale="log", yscale="log")
plt.show()

# %% [markdown]
# Absorbed attention does three times the arithmetic of full heads and reads a thirty-sixth of the bytes. Decoding
# waits for memory, so that is a bargain; and a tree of drafts, whose nodes all read the same prefix, makes it a
# better one.

# %% [markdown]
# ## Positions
#
# The rotated part of a query or key is a list of pairs (0, 1), (2, 3), …; pair $i$ turns by an angle of position ·
# $\theta^{-2i/d}$. A score then depends on the distance of two tokens and on nothing else. DeepSeek writes pairs
# *interleaved*; most other models pair element $i$ with $i + d/2$.

# %%
random = np.random.default_rng(0)
query, key = random.standard_normal((2, 1, config.qk_rope_head_dim))
by_distance = {}
for distance in (0, 5, 40):
    scores = []
    for position in (100, 400):
        rotated_query = apply_rope(query, np.array([position]), rope(config))
        rotated_key = apply_rope(key, np.array([position - distance]), rope(config))
        scores.append(float((rotated_query * rotated_key).sum()))
    by_distance[distance] = scores
    print(
        f"distance {distance:2d}: score {by_distance[distance][0]:+.3f} at 100, {by_distance[distance][1]:+.3f} at 400"
    )

# %% [markdown]
# A model trained on 4,096 positions has never seen the slow pairs turn all the way. YaRN lets them turn `factor`
# times slower, so that 262,144 positions look like 4,096 to them, leaves the fast ones alone, since they measure
# small distances, and blends between. It also sharpens attention: with more tokens to look at, scores are multiplied
# by $m^2$, $m = 0.1 \ln(\text{factor}) + 1$. Kimi K2 has factor 64. Its releases disagree on `beta_fast`, 1 or 32.
# What does that change?

# %%
kimi = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rope_theta": 50000.0}
plain = dataclasses.replace(config, **kimi)
variants = {"no YaRN": plain}
for beta_fast in (32.0, 1.0):
    yarn = YarnScaling(64.0, 4096, beta_fast, 1.0, mscale=1.0, mscale_all_dim=1.0)
    variants[f"YaRN, beta_fast {beta_fast:.0f}"] = dataclasses.replace(plain, rope_scaling=yarn)
wavelengths = {name: 2 * np.pi / rope(variant).inverse_frequencies for name, variant in variants.items()}
sharpening = softmax_scale(variants["YaRN, beta_fast 1"]) / softmax_scale(plain)

figure, axes = plt.subplots(figsize=(8, 3.3), layout="constrained")
plotting.curves(axes, np.arange(32), wavelengths, ".-").set(yscale="log", xlabel="pair", ylabel="tokens per full turn")
for length in (4096, 64 * 4096):
    axes.axhline(length, color=plotting.QUIET, lw=1, ls="--")
    axes.annotate(f"{length:,} positions", (0, length), xytext=(0, 3), textcoords="offset points", fontsize="small")
plt.show()
print(f"scores are multiplied by {sharpening:.5f}")

# %% [markdown]
# The two settings agree on fast and slow pairs and differ in pairs 9 to 19, where one turns up to ten times slower
# than the other. Neither fails loudly: the text would merely be a little worse. So these numbers are read from the
# checkpoint, never guessed.
#
# ## The router
#
# In the layers after the first, an MLP is one of sixteen *experts*, and each token goes through four. The router
# gives every expert a score between 0 and 1; a *bias* is added, the four best are taken, and the bias is forgotten:
# the weights of the sum come from the scores alone. During training the bias of a crowded expert is lowered in small
# steps, that of an idle one raised. How large has it become, and what does it change? We route five held-out texts
# with and without it.

# %%
routed = range(config.first_k_dense_replace, config.num_hidden_layers)
by_domain, without_bias, changed = {}, np.zeros((len(routed), config.n_routed_experts)), 0
for domain, text in texts.items():
    by_domain[domain] = np.zeros_like(without_bias)
    _, inside = walk(np.array(tokenizer.encode(text).ids[:256]))
    for row, (own, _, y) in enumerate(inside[config.first_k_dense_replace :]):
        router_logits, bias = y @ own["mlp.gate"].T, own["mlp.gate.e_score_correction_bias"]
        chosen, unbiased = (moe_route(router_logits, used, config)[0] for used in (bias, 0 * bias))
        by_domain[domain][row] += np.bincount(chosen.ravel(), minlength=config.n_routed_experts)
        without_bias[row] += np.bincount(unbiased.ravel(), minlength=config.n_routed_experts)
        changed += sum(len(set(a) - set(b)) for a, b in zip(chosen.tolist(), unbiased.tolist(), strict=True))


# %%
def load(counts: np.ndarray) -> np.ndarray:
    """Tokens of each expert, in units of a fair share: [layers, experts]."""
    return counts / counts.mean(axis=1, keepdims=True)


row = 1
order = np.argsort(-without_bias[row])
loads = {"with bias": load(sum(by_domain.values())), "without": load(without_bias)}

# %%
figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
plotting.bars(axes, [str(e) for e in order], {kind: values[row, order] for kind, values in loads.items()})
axes.axhline(1, color=plotting.QUIET, lw=1, ls="--")
axes.set(xlabel=f"expert of layer {routed[row]}", ylabel="load / fair share")
plt.show()
biases = np.array([weights[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"] for layer in routed])
print(f"biases differ by up to {np.ptp(biases, axis=1).max():.2f} within a layer")
print(f"choices that they change: {changed / without_bias.sum():.1%}")

# %% [markdown]
# It has stayed small: biases differ by 0.15 at most, on scores between 0 and 1, and change one choice in twenty,
# where two experts are close. In layer 2, the least even one, they double the load of the idlest expert. On these
# texts they also make one of the busiest busier: a bias balances the mix that the model was trained on, five domains
# in equal parts it does not know.
#
# Do experts specialise? Here is the load that each domain's text alone puts on them.

# %%
figure, axes = plt.subplots(figsize=(10, 2.4), layout="constrained")
plotting.heatmap(axes, np.array([load(seen).ravel() for seen in by_domain.values()]), "load / fair share")
axes.set_yticks(range(len(by_domain)), list(by_domain))
axes.set_xticks(np.arange(len(routed)) * 16 + 7.5, [f"layer {layer}" for layer in routed], minor=False)
axes.set_xticks(np.arange(1, len(routed)) * 16 - 0.5, minor=True)
axes.tick_params(length=0)
axes.grid(axis="x", which="minor", color="white", lw=2)
plt.show()

# %% [markdown]
# They do. The Bible and Shakespeare share a few experts that the Python texts hardly ever call, and each has one or
# two almost to itself. Nobody asked for that: it is what next-token prediction made of sixteen experts and a bias.
#
# ## Against transformers
#
# Reading a paper carefully is no proof. `golden/fixtures/parity` holds eight small random models, which between them
# switch on and off everything that may vary: low-rank queries, YaRN with all its factors, expert groups, several
# dense layers. Each was saved as a checkpoint and run by Hugging Face transformers; its logits are stored. How far is
# the reference from them? Logits have a standard deviation of about 1.

# %%
parity = {name: make_parity.load(name) for name in make_parity.MODELS}
differences, same_choice, tokens = {}, 0, 0
for name, tiny in parity.items():
    rows = []
    for prompt_ids, expected in zip(tiny.ids, tiny.logits, strict=True):
        own_logits = model.forward(tiny.weights, tiny.config, prompt_ids, np.float64)
        rows.append(np.abs(own_logits - expected).max(axis=1))
        same_choice += int((own_logits.argmax(axis=1) == expected.argmax(axis=1)).sum())
    differences[name.replace("_yarn", "\nyarn").replace("_groups", "\ngroups")] = np.concatenate(rows)
    tokens += sum(map(len, rows))
print(f"{same_choice} of {tokens} tokens have the same most probable successor")

# %%
figure, axes = plt.subplots(figsize=(9, 3.2), layout="constrained")
plotting.differences_by_model(axes, differences, 1e-4)
plt.show()

# %% [markdown]
# What remains is the rounding of transformers' float32: the reference ran in float64 here. The text above came from
# the same code.
#
# ## Faults that hide
#
# Would a mistake be noticed? Put three into the reference, one at a time, and compare with transformers token by
# token.


# %%
def half_split(x, positions, rotation):
    """Pairs (i, i + d/2), as most other models have them."""
    return apply_rope(np.stack(np.split(x, 2, axis=-1), axis=-1).reshape(x.shape), positions, rotation)


# %%
faults = {
    "as it is": {},
    "pairs not interleaved": {"apply_rope": half_split},
    "scale without m²": {"softmax_scale": lambda config: config.qk_head_dim**-0.5},
    "scale of the latent": {"softmax_scale": lambda config: config.latent_dim**-0.5},
}
tiny = parity["q_lora_yarn"]
deviation = {}
for name, changed in faults.items():
    with patch.dict(vars(model), changed):
        faulty = model.forward(tiny.weights, tiny.config, tiny.ids[3])
    deviation[name] = np.abs(faulty - tiny.logits[3]).max(axis=1)

# %%
figure, axes = plt.subplots(figsize=(8.5, 3.3), layout="constrained")
plotting.logit_differences(axes, deviation).set(xlabel="token of the prompt", xlim=(0, 40))
plt.show()

# %% [markdown]
# From the second token on, every fault is there for all to see, a hundred thousand times the rounding and more. At
# the first token all of them vanish: attention to a single key has weight 1, whatever its score and its angle. A test
# with a prompt of one token proves nothing about attention. The tests of this project plant fifteen faults of this
# kind and demand that each is caught.
#
# ## Checks

# %%
assert np.array_equal(logits, model.forward(weights, config, ids)), "walk is the reference's forward pass"
assert max(deviations) < 1e-12, "absorbed attention is attention"
for one, other in by_distance.values():
    assert abs(one - other) < 1e-12, "a score depends on the distance"
assert round(sharpening, 5) == 2.00474, "m² for factor 64"
assert same_choice == tokens, "transformers makes the same choices"
assert max(values.max() for values in differences.values()) < 1e-4, "and its logits are the same within rounding"
for name in faults:
    assert deviation[name][0] < 1e-4, "no fault shows at position 0"
    assert (deviation[name][1:].max() > 0.1) == (name != "as it is"), "each one shows after it"
print("all checks hold")

# %% [markdown]
# ## Try it
#
# 1. Plant a fault in the router: keep the bias in the weights (`patch.dict(vars(model), moe_route=...)`). Does it
#    hide at position 0? Which of the eight models shows it best?
# 2. Compute `absorbed_attention` and `model.attention` in float32. Where does the difference come from, and can
#    greedy text depend on it?
# 3. `kv_b_proj` holds `W_UK` and `W_UV` head by head. Read it as all keys, then all values. How wrong are the logits?
#
# ## Where next
#
# [00 · Quickstart](00_quickstart.ipynb) generates text with the engine, which is held to this reference token by
# token.
