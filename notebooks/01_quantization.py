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
# # 01 · Weights of four bits
#
# A language model that writes one token at a time spends its life reading weights. Kimi K2 stores most of them in
# four bits each, with one scale for every 32. What exactly lies in those bits, what does the rounding cost, and which
# weights should be spared?
#
# *You need* NumPy, and nothing of the other notebooks.
#
# *You will learn* the format bit by bit, as Kimi K2 checkpoints ship it; why a group lies along the inputs; three
# ways to choose a scale, and the rounding tie hidden in one of them; what sets the error; which parts of a trained
# model tolerate INT4 and which do not; and why weights must never be quantised twice.
#
# *Runs in* about 30 s on a laptop; no GPU is used.

# %%
import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable

import matplotlib.pyplot as plt
import numpy as np
from ml_dtypes import bfloat16
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from kdtree_nb import plotting
from kdtree_nb.bundle import Bundle
from kdtree_nb.config import ModelConfig
from kdtree_nb.golden import folder
from kdtree_nb.quantization import RULES, dequantize, pack, quantize, quantized_names, routed_experts, unpack
from kdtree_nb.reference.model import forward
from kdtree_nb.reference.sampling import log_softmax

plt.rcParams["figure.dpi"] = 120
trained = Bundle.open(folder() / "kdt16m" / "kdt16m-int4.kdtr")

# %% [markdown]
# ## One group by hand
#
# A *group* is 32 neighbouring weights of one output. They share a *scale*; each keeps a *code*, a whole number from
# −8 to 7. The weight that remains is `code · scale`. Here is one group of a trained matrix. Its scale is chosen so
# that the largest magnitude lands at 7.5 steps.

# %%
matrix = trained["model.layers.3.self_attn.o_proj"].astype(np.float32)  # [out, in], stored in bfloat16
group = matrix[1, :32]
scale = np.abs(group).max() / np.float32(7.5)
codes = np.rint(np.clip(group / scale, -8, 7)).astype(np.int8)
restored = codes * scale
print(*(f"{code:2d}" for code in codes))

# %% [markdown]
# What did rounding do to each of the 32? Every weight moved to the nearest of sixteen values, at most half a step
# away. The largest one pays the full half: more on that below.

# %%
figure, axes = plt.subplots(figsize=(8.5, 3.4), layout="constrained")
plotting.rounded_group(axes, group, codes, scale)
plt.show()

# %% [markdown]
# ## Eight codes to a word
#
# Codes are stored in *offset binary*: `u = code + 8`, a number from 0 to 15, one hexadecimal digit. Eight of them
# fill an int32, element 0 in the lowest four bits. So a word printed in hexadecimal reads from right to left.

# %%
eight = np.array([7, 0, 2, 2, 0, -2, -2, -8])
word = sum(int(code + 8) << 4 * i for i, code in enumerate(eight))
print(f"codes   {eight.tolist()}\ndigits  {[f'{code + 8:x}' for code in eight]}\nword    0x{word:08x}")

# %% [markdown]
# `pack` does this for a whole matrix. Its words are those of the compressed-tensors library, which writes the
# checkpoints of Kimi K2. A group of zeros is worth remembering: it is not a word of zeros, but `0x88888888`.

# %%
for row in (eight, np.arange(-8, 0), np.arange(8), np.zeros(8, int)):
    print(f"{pack(row[None].astype(np.int8)).view(np.uint32)[0, 0]:#010x}  {row.tolist()}")

# %% [markdown]
# Why an offset, when two's complement is there? To read a code one shifts, masks and subtracts 8; no sign has to be
# extended. A GPU goes further and drops the four bits straight into the mantissa of a floating-point number, then
# subtracts the offset together with the exponent's value: a conversion for the price of a subtraction.
#
# ## Why a group lies along the inputs
#
# An output is a sum over inputs, $y = \sum_i w_i x_i$. Where a run of inputs shares its scale, the scale leaves the
# inner sum:
#
# $$ y = \sum_{g} s_g \sum_{i \in g} q_i\, x_i $$
#
# The inner sum needs the codes alone, and one multiplication serves 32 weights. In exact arithmetic nothing changes.

# %%
quantized = quantize(matrix, name="o_proj")
x = np.random.default_rng(0).standard_normal(matrix.shape[1])
by_group = (unpack(quantized.qweight, matrix.shape[1]) * x).reshape(-1, matrix.shape[1] // 32, 32).sum(axis=2)
scale_outside = (quantized.scales * by_group).sum(axis=1)
scale_inside = dequantize(quantized).astype(np.float64) @ x
print(f"the same outputs: {np.allclose(scale_outside, scale_inside, rtol=0, atol=1e-5)}")

# %% [markdown]
# The number of inputs must therefore be a multiple of 32. It is for every DeepSeek-V3 and Kimi K2 matrix, and the
# package refuses to guess for others: padding would have to invent weights.

# %%
try:
    quantize(np.ones((4, 7176), np.float32), name="model.layers.3.mlp.up_proj")
except ValueError as error:
    print(error)

# %% [markdown]
# ## Three rules for the scale, and a tie
#
# - `minmax` divides the largest magnitude by 7.5. It is the rule of compressed-tensors.
# - `amax7` divides by 7. The code −8 stays unused, the largest magnitude is met exactly, every step is 7 % wider.
# - `mse` tries 47 scales between 0.55 and 1 times that of `amax7` and keeps the one of least squared error.
#
# Where does each of the first two spend its error? Draw the error of a weight over the weight, both in units of the
# group's largest magnitude.

# %%
ratios = np.linspace(-1, 1, 4001)
sawtooths = {}
for rule, steps in {"minmax": 7.5, "amax7": 7}.items():
    sawtooths[rule] = np.rint(np.clip(ratios * steps, -8, 7)) / steps - ratios

figure, panels = plt.subplots(1, 2, figsize=(8.5, 2.9), sharey=True, layout="constrained")
for axes, limits in zip(panels, ((-1.02, -0.55), (0.55, 1.02)), strict=True):
    plotting.curves(axes, ratios, sawtooths).set(xlim=limits, xlabel="weight / largest magnitude")
panels[0].set_ylabel("error / largest magnitude")
panels[0].get_legend().remove()
panels[1].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
plt.show()

# %% [markdown]
# `minmax` wins everywhere but at the ends. There, at ±7.5 steps, the largest weight of *every* group sits exactly
# between two codes. +7.5 is clipped to 7; −7.5 is a tie, and rounding half to even makes it −8. A tie is decided by
# the last bit, so whoever computes the scale a little differently gets other codes. The usual way to do so: a
# compiler that multiplies by the reciprocal of 7.5 where the specification divides.

# %%
noise = np.random.default_rng(0).standard_normal((32768, 32)).astype(np.float32)
largest = np.abs(noise).max(axis=1, keepdims=True)
divided, multiplied = largest / np.float32(7.5), largest * np.float32(1 / 7.5)
changed = np.rint(np.clip(noise / divided, -8, 7)) != np.rint(np.clip(noise / multiplied, -8, 7))
print(f"groups with another code: {changed.any(axis=1).mean():.0%} in float32")
print(f"largest change of a scale: {np.abs(multiplied / divided - 1).max():.0e}")

# %% [markdown]
# The seventh digit of a scale decides, and about a third of all groups hold another code: a −8 became a −7, or the
# reverse. Either is as far from the weight as the other, but the model is not the same, and its text may differ.
# Hence a rule of this project: codes and scales are shipped, and nobody computes them anew.
#
# What does `mse` see when it searches? Here are four groups of the trained matrix. A smaller scale rounds all weights
# more finely and clips the largest. Each group has its own optimum, and either rule is only a fixed guess.

# %%
shrinks = np.linspace(0.55, 1.05, 201)
curves = {}
for i in range(4):
    weights = matrix[8 * i, :32]
    scales = np.abs(weights).max() / 7 * shrinks[:, None]
    errors = np.rint(np.clip(weights / scales, -8, 7)) * scales - weights
    curves[f"group {i}"] = np.sqrt(np.square(errors).mean(axis=1) / np.square(weights).mean())

figure, axes = plt.subplots(figsize=(8.5, 3), layout="constrained")
plotting.curves(axes, shrinks, curves)
for rule, at in {"minmax": 7 / 7.5, "amax7": 1}.items():
    axes.axvline(at, color=plotting.QUIET, lw=1, ls="--")
    axes.annotate(
        rule, (at, 1), xycoords=("data", "axes fraction"), rotation=90, va="top", ha="right", fontsize="small"
    )
axes.set(xlabel="scale / scale of amax7", ylabel="relative rms error", ylim=(0, None))
plt.show()

# %% [markdown]
# ## What a smaller group buys
#
# A smaller group has a smaller largest weight, so finer steps; but each group pays for a scale, 16 bits in bfloat16.
# What is the exchange rate? The function below is `quantize` for any group size. Three matrices: attention
# projections of the trained model, Gaussian noise, and the same noise where one weight in 500 is eight times as
# large.


# %%
def round_groups(weight: np.ndarray, size: int, rule: str) -> np.ndarray:
    groups = weight.reshape(-1, size)
    amax = np.abs(groups).max(axis=1, keepdims=True)
    shrinks = {"minmax": [7 / 7.5], "amax7": [1.0], "mse": [7 / 7.5, *np.linspace(1.0, 0.55, 46)]}[rule]
    best, least = groups, np.full_like(amax, np.inf)
    for shrink in shrinks:
        scales = amax / np.float32(7.5) if shrink == 7 / 7.5 else amax / 7 * np.float32(shrink)
        values = np.rint(np.clip(groups / scales, -8, 7)) * scales
        errors = np.square(values - groups).sum(axis=1, keepdims=True)
        best, least = np.where(errors < least, values, best), np.minimum(errors, least)
    return best.reshape(weight.shape)


def relative_error(rounded: np.ndarray, weight: np.ndarray) -> float:
    return float(np.linalg.norm(rounded - weight) / np.linalg.norm(weight))


# %%
layers = range(trained.config.num_hidden_layers)
attention = np.concatenate([trained[f"model.layers.{layer}.self_attn.o_proj"] for layer in layers]).astype(np.float32)
gaussian = np.random.default_rng(1).standard_normal(attention.shape).astype(np.float32)
outliers = np.where(np.random.default_rng(2).random(gaussian.shape) < 1 / 500, 8 * gaussian, gaussian)
matrices = {"trained attention": attention, "Gaussian": gaussian, "Gaussian with outliers": outliers}
sizes = np.array([256, 128, 64, 32, 16])
errors = {
    name: {rule: np.array([relative_error(round_groups(m, size, rule), m) for size in sizes]) for rule in RULES}
    for name, m in matrices.items()
}

# %%
figure, panels = plt.subplots(1, 3, figsize=(10, 3.3), sharey=True, layout="constrained")
for axes, (name, by_rule) in zip(panels, errors.items(), strict=True):
    plotting.curves(axes, 4 + 16 / sizes, by_rule, "o-").set(title=name, xlabel="bits per weight")
    axes.axvline(4.5, color=plotting.QUIET, lw=1, ls="--", zorder=0)
panels[0].set(ylabel="relative rms error", ylim=(0, None))
panels[1].annotate("groups of 256, 128, 64,\n32 (dashed) and 16", (4.55, 0.03), fontsize="small", color=plotting.INK)
plt.show()
for name, by_rule in errors.items():
    print(f"{name:24}", "  ".join(f"{rule} {values[3]:.1%}" for rule, values in by_rule.items()))

# %% [markdown]
# Not quite half a bit, from groups of 256 to groups of 32, takes off a fifth of the error on well-behaved weights and
# nearly half of it where there are outliers: an outlier spoils its own group only. The search beats the fixed rules
# at every size; of those two, `minmax` is a shade better from 32 upwards.
#
# ## What sets a group's error
#
# Rounding to steps of size $s$ leaves an error of about $s/\sqrt{12}$, whatever the weights. And $s =
# \text{peak}/7.5$. So the relative error of a group should be its peak, in units of its root mean square, over
# $7.5\sqrt{12} \approx 26$, and depend on nothing else. Does it?

# %%
groups = attention.reshape(-1, 32)
rms = np.sqrt(np.square(groups).mean(axis=1))
peaks = np.abs(groups).max(axis=1) / rms
residuals = round_groups(attention, 32, "minmax").reshape(-1, 32) - groups
group_errors = np.sqrt(np.square(residuals).mean(axis=1)) / rms

figure, axes = plt.subplots(figsize=(6.5, 3.6), layout="constrained")
plotting.error_of_peaks(axes, peaks, group_errors, peaks / (7.5 * np.sqrt(12)))
plt.show()
print(f"correlation of error and peak: {np.corrcoef(peaks, group_errors)[0, 1]:.2f}")

# %% [markdown]
# The line is followed, a little from above: each group's largest weight is off by half a step by construction. INT4
# is no statement about a model, it is a statement about peaks. That is why methods that move outliers elsewhere
# (rotations, rescaling) help, and why small groups do.

# %% [markdown]
# ## What it saves, and where
#
# A code takes half a byte. With a bfloat16 scale for every 32 it makes 0.5625 bytes a weight (0.625 with a float32
# scale), against 2 in bfloat16: a factor of 3.56. What of the whole model? The small trained one keeps all its MLPs
# in INT4. Kimi K2 keeps only its routed experts so, and they are nearly all of it.

# %%
kimi_k2 = dataclasses.replace(
    trained.config,
    vocab_size=163840,
    hidden_size=7168,
    num_hidden_layers=61,
    num_attention_heads=64,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    n_routed_experts=384,
    num_experts_per_tok=8,
)


# %%
def part_of(name: str) -> str:
    if routed_experts(name):
        return "routed experts"
    if name.endswith(("gate_proj", "up_proj", "down_proj")):
        return "other MLPs"
    return "attention" if "self_attn" in name else "embedding, head" if name.endswith(("tokens", "head")) else "rest"


def sizes_by_part(config: ModelConfig, is_int4: Callable[[str], bool], unit: float) -> dict[str, float]:
    sizes: Counter[str] = Counter()
    for name, shape in config.weight_shapes().items():
        sizes[part_of(name)] += math.prod(shape) * (0.5625 if is_int4(name) else 2) / unit
    return dict(sizes.most_common())


# %%
figure, panels = plt.subplots(2, 1, figsize=(8.5, 3.9), layout="constrained")
mlps = quantized_names(trained.config)
for axes, label, config, is_int4, unit in (
    (panels[0], "kdt16m", trained.config, mlps.__contains__, 1e6),
    (panels[1], "Kimi K2", kimi_k2, routed_experts, 1e9),
):
    parts = {"bfloat16": sizes_by_part(config, lambda name: False, unit), "INT4": sizes_by_part(config, is_int4, unit)}
    plotting.shares(axes, parts, "MB" if unit == 1e6 else "GB").set_title(label, loc="left", y=1.08)
    total, packed = (sum(part.values()) for part in parts.values())
    print(f"{label}: {total:.4g} to {packed:.4g} {axes.get_xlabel()}, a factor of {total / packed:.2f}")
panels[1].get_legend().remove()
plt.show()

# %% [markdown]
# ## What it does to the trained model
#
# What did INT4 cost the MLPs of `kdt16m`? Over the last fifth of its training every weight was used as it ships, so
# that the model could learn around its own rounding. The training kept the float32 weights too, and read the held-out
# texts with both. A *bit per byte* is what a compressor built on the model would need.

# %%
record = json.loads((folder() / "kdt16m" / "training.json").read_text(encoding="utf-8"))
fp32, int4 = (record["bits_per_byte"][kind]["stride_256"] for kind in ("fp32", "int4"))
cost = np.array([int4[domain] - fp32[domain] for domain in fp32])

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3), layout="constrained")
plotting.bars(left, list(fp32), {"float32": np.array(list(fp32.values())), "as shipped": np.array(list(int4.values()))})
left.set(ylabel="bits per byte")
plotting.bars(right, list(fp32), {"as shipped − float32": 1000 * cost})
right.set(ylabel="thousandths of a bit per byte")
plt.show()

# %% [markdown]
# Next to nothing: a thousandth of a bit per byte at most, and SymPy's code even reads a little better. In a trial, a
# model that was trained without rounding paid four to six thousandths.
#
# And the parts that were left in bfloat16, could they be rounded too? We can try, one part at a time, and read
# held-out text with the result. The measure is the Kullback-Leibler divergence of the next-token distribution from
# that of the shipped model, in bits per token. For comparison the MLPs are moved as well, each weight to a random
# place within half a step: to one of the values that are rounded to its code.

# %%
weights = trained.weights()
tokenizer = Tokenizer.from_file(str(trained.path.with_name(trained.tokenizer)))
files = sorted((folder() / "kdt16m" / "heldout").glob("*.txt"))
texts = [np.array(tokenizer.encode(file.read_text(encoding="utf-8")).ids[:96]) for file in files]


def read(changed: dict[str, np.ndarray]) -> np.ndarray:
    """Next-token log-probabilities over all texts, some weights replaced."""
    return log_softmax(np.concatenate([forward({**weights, **changed}, trained.config, text) for text in texts]))


shipped = read({})

# %%
random = np.random.default_rng(0)
variants = {"MLPs, moved": {}}
for name in quantized_names(trained.config):
    steps = trained[f"{name}.sc"].astype(np.float32).repeat(32, axis=1)
    variants["MLPs, moved"][name] = weights[name] + steps * random.uniform(-0.5, 0.5, steps.shape).astype(np.float32)
for part in (
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj",
    "kv_b_proj",
    "o_proj",
    "mlp.gate",
    "embed_tokens",
    "lm_head",
):
    names = [name for name in weights if name.removesuffix("_with_mqa").endswith(part)]
    variants[part] = {name: dequantize(quantize(weights[name])) for name in names}

# %%
measured = {}
for part, changed in variants.items():
    log_probs = read(changed)
    divergence = (np.exp(shipped) * (shipped - log_probs)).sum(axis=1).mean() / np.log(2)
    agreement = (log_probs.argmax(axis=1) == shipped.argmax(axis=1)).mean()
    measured[part] = sum(w.size for w in changed.values()) * (2 - 0.5625) / 1e6, 1000 * divergence, agreement

# %%
saved, divergence, agreement = np.array(list(measured.values())).T
figure, axes = plt.subplots(figsize=(8, 3.8), layout="constrained")
plotting.labelled_points(axes, saved, divergence, list(measured))
axes.set(xlabel="saved by INT4 [MB]", ylabel="divergence [thousandths of a bit per token]", xscale="log", yscale="log")
for axis, ticks in ((axes.xaxis, (0.05, 0.2, 1, 5, 20)), (axes.yaxis, (2, 5, 10, 20, 50))):
    axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_ticks([], minor=True)
plt.show()
for part, (_, divergence, agreement) in measured.items():
    print(f"{part:13} {divergence:5.1f} thousandths of a bit, {agreement:.0%} of the most probable tokens unchanged")

# %% [markdown]
# Nothing breaks; but what a part costs and what it saves have little to do with each other. The MLPs bring eighteen
# megabytes, at a price that training has then taken away. The router brings a twenty-fifth of a megabyte and costs
# almost half as much as they do: a score that moves a little sends a token to another expert. `kv_a_proj` and
# `kv_b_proj` make what every later token reads; `lm_head` is the last step, with nothing after it to mend. Rounding
# `embed_tokens` would be cheap, but a token reads one row of it, so decoding would gain nothing. All of these stay as
# they are, and so does the rest of attention, for the little it would save. Kimi K2 draws its line in the same place.
#
# ## Never twice
#
# A tool reads an INT4 checkpoint, computes in floats and writes INT4 again. Is that harmless? The weights lie on a
# grid already. But under `minmax` the largest of a group now is 7 or 8 steps long, and is divided by 7.5: the new
# scale is 14/15 or 16/15 of the old. The codes hardly change, so the whole group shrinks or grows by 7 %, again and
# again.

# %%
once = quantize(attention)
twice = quantize(dequantize(once))
factors = twice.scales / once.scales
print(f"scales change by {sorted({f'{factor:.4f}' for factor in factors.ravel()})}")
print(f"codes that change: {(unpack(once.qweight, 256) != unpack(twice.qweight, 256)).mean():.1%}")

passes = np.arange(1, 7)
drift = {}
for rule in RULES:
    current, values = attention, []
    for _ in passes:
        current = dequantize(quantize(current, rule))
        values.append(relative_error(current, attention))
    drift[rule] = np.array(values)

# %%
figure, axes = plt.subplots(figsize=(6.5, 3), layout="constrained")
plotting.curves(axes, passes, drift, "o-")
axes.set(xlabel="times quantised", ylabel="relative rms error", ylim=(0, None))
plt.show()

# %% [markdown]
# `amax7` is the one rule that gives its own values back. With the other two the bytes of a checkpoint are the model,
# and they are copied, not made anew. That is what a KDTR bundle and the conversion of Kimi K2 checkpoints do.
#
# ## Checks

# %%
fixture = load_file(folder() / "fixtures" / "compressed_tensors.safetensors")
for case in ("normal", "wide", "special"):
    for dtype in (np.dtype(np.float32), np.dtype(bfloat16)):
        expected = {
            name: fixture[f"{case}.{dtype.name}.{name}"] for name in ("weight", "weight_scale", "weight_packed")
        }
        own = quantize(expected["weight"])
        assert own.scales.tobytes() == expected["weight_scale"].tobytes(), "scales are those of compressed-tensors"
        assert own.qweight.tobytes() == expected["weight_packed"].tobytes(), "words are those of compressed-tensors"
        values = dequantize(own).astype(dtype).tobytes()
        assert values == fixture[f"{case}.{dtype.name}.dequantized"].tobytes(), "so are the weights that come back"
print("bit for bit what compressed-tensors gives, in float32 and bfloat16")

# %%
stored = trained.quantized("model.layers.5.mlp.experts.3.down_proj")
assert (pack(unpack(stored.qweight, stored.shape[1])) == stored.qweight).all(), "unpacking and packing is the identity"
for row in trained.rows():
    assert row.kind == "float" or row.bytes == 0.5625 * math.prod(row.shape), "INT4 takes 0.5625 bytes a weight"
assert np.abs(restored - group).max() <= scale * 0.5001, "no weight moves by more than half a step"
for size_errors in errors.values():
    for rule, values in size_errors.items():
        assert (np.diff(values) < 0).all(), f"{rule}: smaller groups have smaller errors"
    assert (size_errors["mse"] <= np.minimum(size_errors["minmax"], size_errors["amax7"])).all(), (
        "the search never loses"
    )
for rule in RULES:
    same = relative_error(dequantize(quantize(attention, rule)), round_groups(attention, 32, rule))
    assert same < 1e-6, f"{rule}: round_groups is what the package does"
assert drift["amax7"][-1] == drift["amax7"][0], "amax7 may be repeated"
print("all checks hold")

# %% [markdown]
# ## Try it
#
# 1. Replace `7.5` by `7.499` in the first cell on ties. How many groups change now, and what happens to −8?
# 2. Rotate each group of `outliers` by a 32 × 32 Hadamard matrix over √32 before rounding, and back afterwards.
#    Compare the error with the third panel.
# 3. Add a rule of your own to `round_groups`, one with an offset for each group. What does it buy at 4.5 + 0.125
#    bits?
#
# ## Where next
#
# [03 · The reference model](03_reference_model.ipynb) runs the trained model step by step.
