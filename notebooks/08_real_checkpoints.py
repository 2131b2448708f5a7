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
# # 08 · Real checkpoints
#
# Kimi K2 comes as a folder of 600 GB, DeepSeek-V3 as another. This engine reads one file format of its own. What
# happens to the bytes in between, how do we know that nothing was lost on the way, and what does it take to run the
# result? The folder on this page is small enough to be looked at byte by byte, and has everything the large ones have.
#
# *You need* [01 · Weights of four bits](01_quantization.ipynb): codes, scales and groups.
#
# *You will learn* what lies in a checkpoint of Kimi K2 and under which names; where each of its bytes is in a bundle;
# what becomes of fp8 and bfloat16; what a converter of such sizes has to promise; to hold an engine against
# transformers, through the files; and to tell beforehand how much memory a model takes.
#
# *Runs in* about 20 s on a laptop; GPU optional.

# %%
import json
import math
import shutil
import subprocess
import sys
import tempfile
import tracemalloc
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from ml_dtypes import bfloat16, float8_e4m3fn
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from kdtree_nb import plotting
from kdtree_nb.bundle import Bundle, BundleError, Entry
from kdtree_nb.bundle.bundle import summarise
from kdtree_nb.checkpoint import convert, export, open_folder, read_checkpoint
from kdtree_nb.checkpoint.needs import needs
from kdtree_nb.config import ModelConfig
from kdtree_nb.engine import Engine
from kdtree_nb.engine.cache import LatentCache
from kdtree_nb.golden import folder
from kdtree_nb.quantization import quantize, routed_experts
from kdtree_nb.reference.model import forward

plt.rcParams["figure.dpi"] = 120
workspace = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)


def fresh(name: str) -> Path:
    path = Path(workspace.name) / name
    shutil.rmtree(path, ignore_errors=True)
    return path


# %% [markdown]
# ## A folder as Kimi ships it
#
# The model is one of those that transformers has computed logits for: random, with low-rank queries, YaRN by a factor
# of 64 and no expert groups, which is Kimi K2's shape in small. Its weights are put into a folder the way Kimi K2.5
# and K2.6 come from the Hub. Four things are particular to that way:
#
# - the numbers of the text model stand under `text_config`, as the checkpoint can also see;
# - its tensors begin with `language_model.`, and beside them are those of the eyes;
# - routed experts are packed: `weight_packed`, `weight_scale` and `weight_shape` in place of `weight`. Training with
#   quantisation used the codes −7 to 7, so the scale is a group's largest magnitude over 7;
# - all else is bfloat16, the router's bias float32.

# %%
stored = folder() / "fixtures" / "parity" / "q_lora_yarn.safetensors"
with safe_open(stored, "numpy") as file:
    settings = json.loads(file.metadata()["parity"])["config"]
fixture, config = load_file(stored), ModelConfig.from_hf(settings)
weights = {name: fixture[name] for name in config.weight_shapes()}
groups_of_32 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
quantization = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
quantization["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": groups_of_32}}
text = {**settings, "model_type": "kimi_k2", "quantization_config": quantization}
kimi_settings = {"model_type": "kimi_k25", "text_config": text}


# %%
def stored_name(weight: str) -> str:
    return weight if weight.endswith("_bias") else f"{weight}.weight"


def write_folder(path: Path, settings: dict, tensors: dict[str, np.ndarray], shards: int = 1) -> Path:
    """As on the Hub: config.json, and the tensors dealt out to safetensors files with an index."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(settings, indent=1))
    files = [f"model-{i:05d}-of-{shards:05d}.safetensors" for i in range(1, shards + 1)]
    weight_map = {name: files[i * shards // len(tensors)] for i, name in enumerate(tensors)}
    for file in files:
        save_file({name: t for name, t in tensors.items() if weight_map[name] == file}, path / file, {"format": "pt"})
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}, indent=1))
    return path


kimi_tensors = {"vision_tower.patch_embed.proj.weight": np.ones((48, 3, 14, 14), bfloat16)}
for name, weight in weights.items():
    at = f"language_model.{name}"
    if routed_experts(name):
        packed = quantize(weight, "amax7", name)
        kimi_tensors[f"{at}.weight_packed"], kimi_tensors[f"{at}.weight_scale"] = packed.qweight, packed.scales
        kimi_tensors[f"{at}.weight_shape"] = np.array(weight.shape, np.int32)
    else:
        kimi_tensors[f"language_model.{stored_name(name)}"] = weight
kimi = write_folder(fresh("kimi"), kimi_settings, kimi_tensors, shards=3)
print(*sorted(path.name for path in kimi.iterdir()), sep="\n")

# %% [markdown]
# What does the package see in it? Before it reads a tensor it holds all headers against the config: every weight
# there, in its shape, in a form that config.json announces, and nothing left over that it cannot explain.

# %%
checkpoint = read_checkpoint(open_folder(kimi))
for line in summarise(checkpoint.rows()):
    if "norm" not in line.name:
        print(f"{line.name:62} {line.kind:6} {line.dtype:10} {line.bytes:7,}")
print("left out:", *checkpoint.skipped)

# %% [markdown]
# ## The same bytes
#
# `convert` writes the bundle: a safetensors file too, with the config and a checksum for each tensor in its header.

# %%
bundle = Bundle.open(convert(kimi, fresh("bundle")))
packed_weights = [name.removesuffix(".qw") for name in bundle if name.endswith(".qw")]
for name in packed_weights:
    assert bundle[f"{name}.qw"].tobytes() == kimi_tensors[f"language_model.{name}.weight_packed"].tobytes()
    assert bundle[f"{name}.sc"].tobytes() == kimi_tensors[f"language_model.{name}.weight_scale"].tobytes()
print(f"{len(packed_weights)} packed weights, words and scales the same bytes in both")

# %% [markdown]
# Here is one group, read from either file by its place alone. A row of `up_proj` has 64 inputs, so two groups; 16 bytes
# hold the 32 codes of one, the lower half of each byte first. Its scale is two bytes of bfloat16, the upper half of a
# float32.

# %%
chosen, row, group = "model.layers.1.mlp.experts.3.up_proj", 5, 1
number, parts = 2 * row + group, checkpoint.weights[chosen]
places = {
    "checkpoint": [(rows.file, rows.offset) for rows in (parts.data, parts.scales)],
    "bundle": [bundle.place(chosen + ending) for ending in (".qw", ".sc")],
}
for where, ((file, codes_at), (scale_file, scale_at)) in places.items():
    words = np.fromfile(file, np.uint8, 16, offset=codes_at + 16 * number).tobytes()
    scale_bytes = np.fromfile(scale_file, np.uint8, 2, offset=scale_at + 2 * number).tobytes()
    print(f"{where:11} codes {words.hex(' ')}   scale {scale_bytes.hex(' ')}")

# %%
codes = [nibble - 8 for byte in words for nibble in (byte & 15, byte >> 4)]
scale = np.frombuffer(bytes(2) + scale_bytes, "<f4")[0]
by_hand = np.array(codes, np.float32) * scale
print("codes", *codes, f"  scale {scale:.6f}")
print("the package reads the same:", np.array_equal(by_hand, bundle.weight(chosen)[row, 32 * group :]))

# %% [markdown]
# If no byte changes, what does conversion do? It sorts. Shards of the Hub come in any order and with passengers. In a
# bundle tensors of four-byte elements come first, so that each begins at a multiple of its size, and within that go by
# name, so that a layer's experts are one long read. The eyes are gone.

# %%
KINDS = {".qw": "INT4 words", "packed": "INT4 words", ".sc": "scales", "scale": "scales", "embed.proj.weight": "eyes"}
lying = [(name, rows.file, rows.offset, rows.nbytes) for name, rows in checkpoint.folder.tensors.items()]
lying += [(name, *bundle.place(name), found.nbytes) for name, found in bundle.entries.items()]
files: dict[str, dict[str, list[tuple[int, int]]]] = {}
for name, file, begin, size in lying:
    kind = next((kind for ending, kind in KINDS.items() if name.endswith(ending)), "other weights")
    files.setdefault(file.name, {}).setdefault(kind, []).append((begin, size))

figure, axes = plt.subplots(figsize=(9, 2.6), layout="constrained")
plotting.file_map(axes, files)
plt.show()

# %% [markdown]
# ## What comes as fp8 or bfloat16
#
# Moonlight is bfloat16 throughout, and its MLPs become INT4 by `minmax`. DeepSeek-V3 stores its projections in eight
# bits, a sign, four of exponent and three of mantissa (E4M3), with a float32 scale for each block of 128 × 128.
# `convert` multiplies the two and rounds to bfloat16, as DeepSeek's own script does, before anything else is done.


# %%
def fp8_blocks(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """E4M3 values and the scales of their blocks, which are cut off at the edges."""
    values = weight.astype(np.float32)
    down, across = (np.arange(0, size, 128) for size in values.shape)
    scales = np.maximum.reduceat(np.maximum.reduceat(np.abs(values), down, axis=0), across, axis=1) / 448
    spread = scales.repeat(128, axis=0)[: values.shape[0]].repeat(128, axis=1)[:, : values.shape[1]]
    return (values / spread).astype(float8_e4m3fn), scales


floats = {stored_name(name): weight for name, weight in weights.items()}
eights = dict(floats)
for name, weight in weights.items():
    if name.endswith(("_proj", "with_mqa")):
        eights[f"{name}.weight"], eights[f"{name}.weight_scale_inv"] = fp8_blocks(weight)
fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
deepseek = write_folder(fresh("deepseek"), {**settings, "quantization_config": fp8}, eights)
moonlight = write_folder(fresh("moonlight"), settings, floats)
roads = {
    "bfloat16": Bundle.open(convert(moonlight, fresh("kept"), select="none")),
    "fp8": Bundle.open(convert(deepseek, fresh("eight"), select="none")),
    "Kimi's INT4": bundle,
    "bfloat16 → INT4": Bundle.open(convert(moonlight, fresh("four"))),
    "fp8 → INT4": Bundle.open(convert(deepseek, fresh("eight to four"))),
}
truth, errors = weights[chosen].astype(np.float32), {}
for road, made in roads.items():
    errors[road] = float(np.linalg.norm(made.weight(chosen).astype(np.float32) - truth) / np.linalg.norm(truth))
    print(f"{road:16} {made.nbytes:7,} bytes, an expert's weights are off by {errors[road]:4.1%}")

# %% [markdown]
# Rounded twice, fp8 first, is hardly worse than rounded once: independent errors add in squares. The road not to take
# is from INT4 to floats and to INT4 again by another rule; `convert` never does, what comes packed stays packed.
#
# ## What a converter of 600 GB has to promise
#
# **It does not need the memory.** Nothing is held but blocks of about a megabyte, a few for each thread. The peak must
# not depend on how large the checkpoint is.

# %% tags=["nbval-ignore-output"]
peaks = {}
for rows_of_vocabulary in (2**14, 2**16, 2**18):
    table = np.ones((rows_of_vocabulary, 64), bfloat16)
    wide = floats | {"model.embed_tokens.weight": table, "lm_head.weight": table}
    source = write_folder(fresh("wide"), {**settings, "vocab_size": rows_of_vocabulary}, wide)
    size = sum(path.stat().st_size for path in source.iterdir())
    tracemalloc.start()
    convert(source, fresh("wide bundle"), select="none")
    peaks[size] = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    print(f"{size / 1e6:5.1f} MB of checkpoint, at most {peaks[size] / 1e6:4.1f} MB of arrays at once")

# %% [markdown]
# **It can be stopped at any moment.** Shards appear under their names only when all are there; until then they are
# hidden, and no half of a bundle can be mistaken for one. Here is a converter that dies in the middle, with no time to
# clean up, and its successor. Which shards are kept shows in their times: nobody has written to them again.

# %%
DIES = """
import os, sys
from kdtree_nb.checkpoint import convert
convert(*sys.argv[1:], max_shard_bytes=30_000, progress=lambda done, total: done > total / 2 and os._exit(9))
"""
resumed = fresh("resumed")
died = subprocess.run([sys.executable, "-c", DIES, str(kimi), str(resumed)])
finished = {path.stat().st_mtime_ns for path in resumed.glob(".*.done")}
begun = len(list(resumed.glob(".*.tmp")))
print(f"exit code {died.returncode}; left behind: {len(finished)} finished shards, {begun} begun")
try:
    Bundle.open(resumed)
except BundleError as error:
    print("opened:", str(error).partition(": ")[2])

convert(kimi, resumed, max_shard_bytes=30_000)
whole = convert(kimi, fresh("whole"), max_shard_bytes=30_000).parent
shards = sorted(path.name for path in whole.iterdir())
kept = sum((resumed / name).stat().st_mtime_ns in finished for name in shards)
same = all((resumed / name).read_bytes() == (whole / name).read_bytes() for name in shards)
print(f"{kept} of {len(shards) - 1} shards were kept; byte for byte as if never stopped: {same}")

# %% [markdown]
# **It refuses what it does not understand**, before it writes a byte. A setting that is ignored would give a model
# that talks, and talks a little worse. Each of these is one change to the folder above.


# %%
def refusal(change) -> str:
    settings, tensors = json.loads(json.dumps(kimi_settings)), dict(kimi_tensors)
    change(settings["text_config"], tensors)
    try:
        return f"made {convert(write_folder(fresh('odd'), settings, tensors), fresh('never'))}"
    except BundleError as error:
        return str(error).replace(str(fresh("odd")), "").lstrip("/\\: ")


expert = "language_model.model.layers.1.mlp.experts.0.up_proj"
ODDITIES = {
    "groups of 64": lambda s, t: s["quantization_config"]["config_groups"]["group_0"]["weights"].update(group_size=64),
    "softmax router": lambda s, t: s.update(scoring_func="softmax"),
    "a lost tensor": lambda s, t: t.pop(f"{expert}.weight_scale"),
    "zero points": lambda s, t: t.update({f"{expert}.weight_zero_point": np.zeros((4, 2), np.int32)}),
    "a stranger": lambda s, t: t.update({"language_model.lm_head.bias": np.zeros(72, np.float32)}),
}
refusals = {oddity: refusal(change) for oddity, change in ODDITIES.items()}
for oddity, message in refusals.items():
    print(f"{oddity:15} {message.replace(expert, '…up_proj')}")
nothing_written = not (Path(workspace.name) / "never").exists()

# %% [markdown]
# ## And back
#
# A bundle can go where others serve it: `export` writes a Hugging Face folder, packed weights in the same bytes once
# more. So the way around must end where it began, and here it does, to the last bit of every file.

# %%
exported = export(bundle.path, fresh("exported"))
returned = load_file(exported / "model.safetensors")
came_back = {name.removeprefix("language_model."): t for name, t in kimi_tensors.items() if "vision" not in name}
assert returned.keys() == came_back.keys()
assert all(returned[name].tobytes() == tensor.tobytes() for name, tensor in came_back.items())
once_more = convert(exported, fresh("once more"))
same_file = once_more.read_bytes() == bundle.path.read_bytes()
print(f"{len(returned)} tensors came back; converted again, the same file: {same_file}")

# %% [markdown]
# ## Is it still the same model?
#
# Bytes that arrive are half of the proof. The other half is that they mean the same here as where they come from.
# transformers has run this model, from its bfloat16 weights in float32, over 96 tokens; the engine runs them from each
# bundle.


# %%
def logits_of(engine: Engine, token_ids: np.ndarray) -> np.ndarray:
    """Logits [tokens, vocab] of a whole text."""
    device, chain = engine.device, np.arange(len(token_ids), dtype=np.int32)
    with device.running():
        cache = LatentCache(engine.config, len(token_ids), device)
        inputs = map(device.put, (token_ids, chain - 1, chain))
        return device.host(engine.model.forward(*inputs, cache).logits)


ids, expected = fixture["ids.3"], fixture["logits.3"]
logits = {road: logits_of(Engine.load(made.path), ids) for road, made in roads.items()}
apart = {road: np.abs(rows - expected).max(axis=1) for road, rows in logits.items()}

# %%
shown = ("bfloat16", "Kimi's INT4", "fp8")
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained", width_ratios=(4, 6))
few = {road: logits[road][::4].ravel() for road in shown}
plotting.against(left, expected[::4].ravel(), few, "logit in transformers").set(ylabel="logit in the engine")
plotting.logit_differences(right, {road: apart[road] for road in shown}).set(xlabel="token of the text")
right.axhline(1e-4, color=plotting.QUIET, lw=1, ls="--")
right.annotate("asked of what is not rounded", (1, 1e-4), xytext=(0, 3), textcoords="offset points", fontsize="small")
plt.show()

# %% [markdown]
# On the left, blue lies on the diagonal. On the right, its distance from it: 10⁻⁶ and a little, at token 1 as at token
# 96, far outside YaRN's original 32 positions. A wrong name, a swapped half or a forgotten factor would be at the top.
# What rounding moves lies a hundred thousand times higher, and fp8 moves more than INT4: it has touched every
# projection, Kimi's INT4 the routed experts alone.
#
# Of packed weights transformers has no logits here: it would have to unpack first. So the specification does. It
# multiplies the bundle's codes by their scales and computes in full heads, without a cache.

# %%
gap = np.abs(logits["Kimi's INT4"] - forward(bundle.weights(), config, ids)).max()
print(f"engine and specification on the packed weights: closer than 0.0001: {gap < 1e-4}")

# %% [markdown]
# ## What changes for the real ones
#
# Nothing in the steps. There are dozens of shards instead of three, and the sizes decide where the bundle can run. They
# follow from config.json alone: count the weights, 0.5625 bytes for one in INT4 and 2 for one in bfloat16, and add the
# latent cache.

# %%
# vocabulary, hidden, layers, heads, rank of queries; latent and heads; widths; experts; dense layers, positions
LATENT = (512, 128, 64, 128)
REAL = {
    "Moonlight": ModelConfig(163840, 2048, 27, 16, None, *LATENT, 11264, 1408, 64, 6, 2, 1, 8192),
    "DeepSeek-V3": ModelConfig(129280, 7168, 61, 128, 1536, *LATENT, 18432, 2048, 256, 8, 1, 3, 8192),
    "Kimi K2": ModelConfig(163840, 7168, 61, 64, 1536, *LATENT, 18432, 2048, 384, 8, 1, 1, 8192),
}
PARTS = {".experts.": "routed experts", "self_attn": "attention", ".mlp.": "other MLPs", "": "embedding, head, norms"}


by_part, needed = {}, {}
for label, real in REAL.items():
    sizes = {name: math.prod(shape) for name, shape in real.weight_shapes().items()}
    bytes_of = {name: size * (9 if routed_experts(name) else 32) // 16 for name, size in sizes.items()}
    needed[label] = needs(real, {name: Entry((), "", size, Path()) for name, size in bytes_of.items()})
    by_part[label] = dict.fromkeys(PARTS.values(), 0.0) | {"cache of 8,192 tokens": needed[label].cache / 1e9}
    for name, size in bytes_of.items():
        by_part[label][next(part for piece, part in PARTS.items() if piece in name)] += size / 1e9
    gpus = ", ".join(f"{needed[label].gpus(size)} × {size} GB" for size in (24, 80, 141))
    total = sum(sizes.values()) / 1e9
    print(f"{label:12} {total:6,.0f} B weights, {needed[label].gpu / 1e9:5.1f} GB on the GPU: {gpus}")

# %%
figure, axes = plt.subplots(figsize=(10, 2.8), layout="constrained")
plotting.shares(axes, by_part, "GB")
for count in (1, 8):
    axes.axvline(141 * count, color=plotting.INK, lw=1, ls="--", zorder=0)
    axes.text(141 * count - 6, 0, f"{count} H200", ha="right", va="center", fontsize="small")
plt.show()

# %% [markdown]
# Here is one of them on one H200: random numbers in Moonlight's shape (`python -m golden.moonlight`), converted, loaded
# and run. Loading reads the files in 16 threads, straight into pinned buffers that the GPU fetches by itself while
# others are filled; experts land in their stacks. What is it held up by, the disk, the bus or itself?

# %%
run = json.loads((folder() / "measurements" / "moonlight-h200.json").read_text(encoding="utf-8"))
steps = {step["step"]: step for step in run["results"]}
loading = {way["source"]: way for way in steps["load"]["loadings"]}
rates = {"convert": steps["convert"]["gb_per_s"]}
for source, way in loading.items():
    rates |= {f"{source}: read": way["read_gb_per_s"], f"{source}: to the GPU": way["gb_per_s"]}
rates["bus"] = steps["load"]["bus_gb_per_s"]
print(f"{run['device']}: {steps['convert']['bytes'] / 1e9:.1f} GB converted in {steps['convert']['seconds']:.0f} s")
print(f"on the GPU {steps['generate']['gpu_bytes'] / 1e9:.2f} GB, predicted {needed['Moonlight'].gpu / 1e9:.2f}")
print({source: f"{way['share']:.0%} of the slower of reading and bus" for source, way in loading.items()})

# %%
figure, axes = plt.subplots(figsize=(9, 2.8), layout="constrained")
plotting.bars(axes, [label.replace(": ", "\n") for label in rates], {"GB/s": np.array([*rates.values()])})
axes.get_legend().remove()
axes.set(ylabel="GB/s")
plt.show()

# %% [markdown]
# From the disk, it is the disk. Files that the system still holds in memory come faster than anything else here can
# take them: what is left to win there is the time in which ten thousand tensors are planned and sent one by one.
#
# Routed experts are nearly all of a model, and of those a token reads 8 in 384: the reason why four bits pay here, and
# also why so much memory stands idle. The latent cache is the opposite, 576 numbers a token and layer.
#
# Moonlight fits one card with room to spare. On a machine with the checkpoint and a GPU:
#
# ```
# python -m kdtree_nb inspect Moonlight-16B-A3B           # sizes, what would be quantised, how many GPUs
# python -m kdtree_nb convert Moonlight-16B-A3B bundle    # called again after a crash, it goes on
# python -m kdtree_nb inspect bundle --verify             # every checksum
# python -m kdtree_nb generate --bundle bundle --prompt "def main():" --decoder ddtree --drafter lookup
# ```
#
# This engine runs on one GPU. DeepSeek-V3 and Kimi K2 need several, and there others serve, from the exported folder.
# How many, `inspect` says; as attention heads have to divide among them, three H200s become four, and five eight.
#
# ```
# python -m kdtree_nb export bundle served
# vllm serve served --tensor-parallel-size 8
# python -m sglang.launch_server --model-path served --tp 8
# ```
#
# ## Checks

# %%
assert set(packed_weights) == set(filter(routed_experts, weights)), "Kimi's routed experts are packed, and nothing else"
assert np.array_equal(by_hand, bundle.weight(chosen)[row, 32 * group :]), "a group by hand is what the package reads"
assert all(np.array_equal(roads["bfloat16"][name], weights[name]) for name in weights), "bfloat16 passes untouched"
assert 0 < errors["fp8"] < errors["fp8 → INT4"] < 1.1 * errors["bfloat16 → INT4"], "fp8 hides behind INT4"
assert peaks[max(peaks)] < max(peaks) / 2, "the memory of a conversion is blocks, not tensors"
assert died.returncode == 9 and kept == len(finished) > 0 and same, "a killed conversion goes on where it stood"
assert nothing_written and all("expected" in message or "asymm" in message for message in refusals.values()), (
    "no guessing"
)
assert same_file, "out and in again is where it began"
assert apart["bfloat16"].max() < 1e-4 < 1e-2 < apart["Kimi's INT4"].max(), "unrounded, it has transformers' logits"
assert gap < 1e-4, "what is packed has the specification's"
assert loading["disk"]["share"] > 0.6, "loading keeps up with the disk"
assert abs(steps["generate"]["gpu_bytes"] / needed["Moonlight"].gpu - 1) < 0.02, "and takes the memory that was said"
assert [needed[label].gpus(141) for label in REAL] == [1, 3, 5], "H200s by memory alone"
print("all checks hold")

# %% [markdown]
# ## Try it
#
# 1. Add a sixth oddity: `rope_scaling` of another type, or 8 bits. Where is it caught?
# 2. Swap two bytes somewhere in a copy of the bundle. Does it open? What does `Bundle.verify` say, and which of the
#    checks above would have noticed without it?
# 3. `python -m golden.moonlight make FOLDER --layers 3 --shrink 8` makes a checkpoint of Moonlight's shape. Convert it,
#    and compare what `inspect` says of folder and bundle. It has no tokenizer, so `generate` cannot read a text: give
#    it `--token-ids 1,2,3`, and it answers in ids. For text, put the `tokenizer.json` of `golden/kdt16m` beside its
#    `config.json` and convert again.
#
# ## Where next
#
# [04 · Wiring the engine](04_engine_wiring.ipynb) follows a bundle's bytes into a forward pass;
# [06 · DDTree decoding](06_ddtree_decoding.ipynb) gets several tokens out of one. The format of the packed
# weights is documented by compressed-tensors, the library of the vLLM project that writes it.
