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
# # 07 · Performance
#
# Where does the time of a token go, and how much of it is owed to the machine? Memory can only be read so fast, and
# tensor cores can only multiply so fast; both were measured. Everything above that floor is ours to explain: a kernel
# that keeps too few bytes under way, a round that waits, a rule that forbids the fastest cut.
#
# *You need* [02 · The W4A16 kernel](02_w4a16_kernel.ipynb) for the floor of a product and
# [06 · DDTree decoding](06_ddtree_decoding.ipynb) for the round.
#
# *You will learn* to read a roofline; which of a round's parts are worth work; what a pass has to commit before a tree
# pays; what equal bits in every batch cost; and how a kernel became many times faster, step by step.
#
# *Runs in* about 15 s on a laptop, some seconds more the first time, when kernels compile; GPU optional. Figures are
# drawn from `golden/measurements/`, whose files `python -m kdtree_nb bench … --json` wrote on one NVIDIA H200. Each
# file is one run, and so are the ratios in it.

# %%
import json
from textwrap import fill

import matplotlib.pyplot as plt
import numpy as np
from ml_dtypes import bfloat16

from kdtree_nb import plotting
from kdtree_nb.bench import attention, floors, gemm, moe
from kdtree_nb.bench.ceilings import Ceilings
from kdtree_nb.bench.engines import expected_experts
from kdtree_nb.bench.floors import Measured
from kdtree_nb.bench.layer import passes_per_second
from kdtree_nb.bench.step import Step
from kdtree_nb.engine.device import Device, cuda_available
from kdtree_nb.golden import folder
from kdtree_nb.kernels.emulator.build import KernelError, find_compiler
from kdtree_nb.kernels.w4a16_mma import geometry_of, launch, tile_weight, untile_weight, w4a16_mma
from kdtree_nb.quantization import dequantize, quantize
from kdtree_nb.reference.linear import linear, tile

plt.rcParams["figure.dpi"] = 120


def measured(name: str) -> dict:
    return json.loads((folder() / "measurements" / f"{name}-h200.json").read_text(encoding="utf-8"))


runs = {name: measured(name) for name in ("gemm", "moe", "attention", "tree", "step", "model")}
limits = {name: Ceilings(**run["ceilings"]) for name, run in runs.items()}
for name, run in runs.items():
    read, multiply = limits[name]
    print(f"{name:10}{run['device']}, {run['date']}: reads {read:,.0f} GB/s, bfloat16 {multiply:.0f} TFLOP/s")

# %% [markdown]
# ## Which limit?
#
# A kernel that does many operations for each byte it reads is limited by the multipliers, one that does few by memory.
# A *roofline* plots what a kernel reaches, in operations a second, over the operations a byte it has to do. The roof
# is what the machine allows: it rises with the bandwidth, and is flat where the multipliers are full. Bytes are those
# that no kernel can do without: packed weights and scales once, the cache once. What a kernel reads twice puts it
# below the roof.


# %%
def over_rows(found: list[Measured], kernel: str, key: str, value) -> tuple[np.ndarray, ...]:
    """Operations, bytes and microseconds of a kernel for one shape, layer or prefix."""
    chosen = [one for one in found if one.kernel == kernel and one.case[key] == value]
    return tuple(np.array([getattr(one, name) for one in chosen]) for name in ("operations", "bytes", "microseconds"))


products = [Measured(**result) for result in runs["gemm"]["results"]]
experts = [Measured(**result) for result in runs["moe"]["results"]]
attended = [Measured(**result) for result in runs["attention"]["results"]]
kernels = {"w4a16_mma": (products, "shape"), "moe_mma": (experts, "layer"), attention.OURS: (attended, "prefix")}
lines = {
    kernel: [over_rows(found, kernel, key, value) for value in dict.fromkeys(one.case[key] for one in found)]
    for kernel, (found, key) in kernels.items()
}
figure, axes = plt.subplots(figsize=(8.5, 4.4), layout="constrained")
plotting.roofline(axes, *limits["gemm"], lines)
plt.show()
read, multiply = limits["gemm"]
print(f"the roof breaks at {1e3 * multiply / read:.0f} operations a byte")

# %% [markdown]
# Each line is a shape, and more rows lie further to the right. Three kernels, three pictures.
#
# - A **product** shares its weight among all rows: operations a byte grow with the rows, along the roof's slope. Up to
#   some 50 rows memory is the limit. How far a point lies below the slope is what the kernel wastes. The two lowest
#   lines are Moonlight's experts, weights of under 2 MB that are over before memory is busy.
# - **Experts** move little to the right. More rows choose more experts, so there are more bytes for the new operations.
#   This is a kernel for memory, at every size of tree.
# - **Attention** with 64 heads on one latent cache begins close to the break, and a tree is far beyond it. This is a
#   kernel for the multipliers, but for a single row. A prefix is a line, a longer one lies further to the right.
#
# ## Products
#
# Two questions for each shape: how far from the floor, and how far from the fastest kernel of other people in the same
# run? The dashes are the goals that were set for the second: 0.7 up to 16 rows, and no slower with 32 and 64.


# %%
def by_case(found: list[Measured], name: str, key: str, peers: set[str]) -> dict[str, list]:
    """Rows of the table that ``bench`` prints: each case beside its floor and the best peer."""
    table = floors.table(found, limits[name], peers)
    return {
        value: [row for row in table if row.case[key] == value] for value in dict.fromkeys(r.case[key] for r in table)
    }


def rows_axis(axes, rows) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(rows, map(str, rows))
    axes.set(xlabel="rows")


GOALS = {1: 0.7, 8: 0.7, 16: 0.7, 32: 1.0, 64: 1.0}
of_shape = by_case(products, "gemm", "shape", {one.kernel for one in products} - set(gemm.OURS))
figure, panels = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
for axes, (key, title) in zip(panels, (("of_floor", "floor"), ("of_best_peer", "best peer of the run")), strict=True):
    ratios = {shape: np.array([getattr(row, key) for row in found]) for shape, found in of_shape.items()}
    plotting.curves(axes, np.array(gemm.ROWS), ratios, "o-").set(title=f"time / {title}", ylim=(0, None))
    rows_axis(axes, gemm.ROWS)
axes.hlines([0.7, 1.0], [1, 32], [16, 64], color=plotting.INK, ls="--", lw=1)
axes.get_legend().remove()
plt.show()
table = [row for found in of_shape.values() for row in found]
missed = [row for row in table if row.of_best_peer > GOALS[row.case["rows"]]]
print(f"goals met in {len(table) - len(missed)} of {len(table)} cases; best peers: ", end="")
print(", ".join(sorted({row.best_peer for row in table})))
for row in missed:
    print("not met: {shape}, {rows} rows, ".format(**row.case) + f"{row.of_best_peer:.2f} of {row.best_peer}")

# %% [markdown]
# A product alone is over in a few microseconds, and a good part of them is no one's work: the launch, the way to the
# first byte, the last step's sums. So one row stays at about twice the floor, and Moonlight's small experts at much
# more. With 64 rows memory is no longer the only limit, and bfloat16 weights, which need no unpacking, are a rival.
#
# ## Experts
#
# A layer's routed experts are most of a pass of Kimi K2. How many of them are read depends on the rows, each of which
# chooses its own.

# %%
of_layer = by_case(experts, "moe", "layer", {moe.PEER})
figure, panels = plt.subplots(1, len(of_layer), figsize=(7 * len(of_layer), 3.8), layout="constrained", squeeze=False)
for axes, (layer, found) in zip(panels[0], of_layer.items(), strict=True):
    shape, rows = moe.SHAPES[layer], np.array([row.case["rows"] for row in found])
    times = {kernel: [row.microseconds.get(kernel, np.nan) for row in found] for kernel in ("moe_mma", moe.PEER, "moe")}
    many = np.geomspace(1, rows[-1], 100)
    chosen = np.array([expected_experts(shape.experts, shape.top_k, count) for count in many])
    bounds = {
        "reading the experts chosen": chosen * shape.expert_bytes / limits["moe"].read_gb_per_s / 1e3,
        "operations": shape.operations(many) / limits["moe"].bf16_tflop_per_s / 1e6,
    }
    plotting.floors(axes, many, bounds, rows, times).set(ylabel="µs", title=layer)
plt.show()
for layer, found in of_layer.items():
    print(f"{layer:10} rows " + "".join(f"{row.case['rows']:8}" for row in found))
    print(f"{'':10} / floor" + "".join(f"{row.of_floor:7.2f} " for row in found))
    print(f"{'':10} / peer " + "".join(f"{row.of_best_peer:7.2f} " for row in found))

# %% [markdown]
# `moe` is the exact kernel in fp32, timed up to 8 rows. Humming's figure is of its two grouped products alone; ours
# holds the sorting of pairs, SwiGLU and the weighted sum as well. With Kimi K2 memory has enough to do: gigabytes from
# hundreds of experts, and a launch is nothing beside it. So the floor is near, and there is little left to win.
#
# ## Attention
#
# The nodes of a tree see the prefix and their own ancestors. The floor is the slower of reading the cache once and of
# multiplying 64 heads with it.

# %%
FLASH_MLA = {  # µs for 1, 17 and 65 rows; another run on such a card, without an ancestor mask
    1024: [13.1, 19.2, 31.2],
    4096: [25.1, 30.8, 67.7],
    32768: [47.7, 128, 464],
}
of_prefix = by_case(attended, "attention", "prefix", {attention.PEER})
figure, panels = plt.subplots(1, len(of_prefix), figsize=(12, 3.8), layout="constrained", sharey=True)
for axes, (prefix, found) in zip(panels, of_prefix.items(), strict=True):
    nodes = [row.case["rows"] for row in found]
    times = {kernel: np.array([row.microseconds[kernel] for row in found]) for kernel in found[0].microseconds}
    times |= {"FlashMLA, no mask": np.array(FLASH_MLA[prefix]), "floor": np.array([row.floor for row in found])}
    plotting.curves(axes, np.array(nodes), times, "o-").set(title=f"{prefix:,} tokens before")
    axes.set_yscale("log")
    rows_axis(axes, nodes)
for axes in panels[1:]:
    axes.get_legend().remove()
panels[0].set(ylabel="µs")
plt.show()
print(f"{'prefix':>8}{'rows':>6}{'/ floor':>9}{'/ torch':>9}{'TFLOP/s':>9}")
for prefix, found in of_prefix.items():
    operations, _, times = over_rows(attended, attention.OURS, "prefix", prefix)
    for row, rate in zip(found, operations / times / 1e6, strict=True):
        print(f"{prefix:8,}{row.case['rows']:6}{row.of_floor:9.1f}{row.of_best_peer:9.2f}{rate:9.0f}")

# %% [markdown]
# Trees are served at least about twice as fast as by torch's two products, which write all scores to memory and read
# them again. For one row there is less to save. FlashMLA, which has no ancestor mask, is the bar. On Hopper our kernel
# multiplies by `wgmma` too, the instruction of four warps together, and elsewhere by `mma.sync`, which every GPU since
# sm_80 has; the emulator models both. But it takes each node as a row of its own, so that a node's bits depend on
# nothing but its position: the prefix is read once for each node, and not once for all.
#
# ## A round and its parts
#
# Now the whole round, for the small trained model `kdt16m` and its drafter, both in bfloat16. Each part was timed
# as a graph of its own; the mark is the round as `generate` runs it, by the clock on the wall. What lies between the
# bar and the mark is idle time: the host, and waiting. Where the mark lies inside the bar, parts overlapped.

# %%
steps = [Step(**result) for result in runs["step"]["results"]]
names = ["plain" if step.rows == 1 else f"{step.rows - 1} nodes" for step in steps]
PARTS = {"draft": "draft", "build": "build", "verify": "verify", "accept": "commit", "idle": "idle"}
parts = [{part: getattr(step, name) for part, name in PARTS.items() if part != "idle"} for step in steps]
figure, axes = plt.subplots(figsize=(10, 3.4), layout="constrained")
plotting.round_timeline(axes, dict(zip(names, parts, strict=True)), [step.round for step in steps])
plt.show()
print("share of the round" + "".join(f"{part:>9}" for part in PARTS) + f"{'pass / floor':>15}")
for name, step in zip(names, steps, strict=True):
    shares = "".join(f"{getattr(step, of) / step.round:9.1%}" for of in PARTS.values())
    print(f"{name:18}{shares}{step.verify / step.measured.floor(limits['step']):15.0f}")

# %% [markdown]
# The pass over the target is most of every round, the draft a quarter of it, and a pass of 65 rows takes less than
# twice as long as one of a single row. But it is about a hundred times above the floor of memory! The few megabytes
# that it needs lie in the L2 cache; what it costs is the number of its kernels, some 130, a microsecond or two each,
# most of which fill a fraction of the card. Work on bandwidth is wasted here; fewer and shorter kernels are what
# helps, and that a kernel begins while the one before it ends. By these means a round of 16 nodes went from 670 µs to
# half of that in one day: the draft's attention from 34 µs to 8, a draft in bfloat16, nine small launches at a
# round's end made one. The tree itself is built in almost no time.
#
# How much do the tree's own kernels cost at full size, with the vocabulary of Kimi K2 and the cache of its 61 layers?

# %%
goals = {"tree_build, B = 64": 25, "tree_build, B = 256": 60, "tree_build, B = 1024": 250}
tree_times = {result["case"]["step"]: result["microseconds"] for result in runs["tree"]["results"]}
for name, time in tree_times.items():
    goal = f"   goal {goals[name]}: {'met' if time <= goals[name] else 'not met'}" if name in goals else ""
    print(f"{name:52}{time:8.1f} µs{goal}")

# %% [markdown]
# Best-first search is one decision after another: which node comes next depends on the one before. That chain of
# shared-memory reads and two maxima over a warp takes hundreds of cycles a node, and more multiprocessors do not
# shorten it. Beside a pass of a large model, which takes milliseconds, a tree of 64 nodes hardly shows.
#
# ## Tokens per second
#
# A model of Moonlight's size, 16 B parameters of which 3 B work on a token, in bfloat16 with INT4 experts. Its weights
# are random and it drafts by prompt look-up, so its text and its acceptance say nothing about real text. What carries
# over is the price of a round, and from it the question for any drafter: how many tokens must a round commit before it
# is worth more than plain decoding? (Look-up works on the host, which costs a wait; a trained drafter costs a pass.)

# %%
model = runs["model"]
decoded = {f"{run['decoder']} {run['node_budget'] or ''}".strip(): run for run in model["results"] if "decoder" in run}
plain = decoded["ar"]
bounds = {"floor of ar": "floor_tokens_per_second", "transformers": "transformers_tokens_per_second"}
bounds = {label: model[key] for label, key in bounds.items() if key in model}
accepted = measured("acceptance-auto-bf16")["results"]
small = {}
for decoder, budget in (("plain", 0), ("chain", 8), ("ddtree", 8), ("ddtree", 16), ("ddtree", 32)):
    found = [run for run in accepted if (run["decoder"], run["node_budget"]) == (decoder, budget)]
    rate, tau = (float(np.mean([run[key] for run in found])) for key in ("tokens_per_second", "tau"))
    small[f"{decoder} {budget or ''}".strip()] = rate, tau

figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
plotting.bars(left, list(decoded), {"tokens/s": np.array([run["tokens_per_second"] for run in decoded.values()])})
for (label, bound), color in zip(bounds.items(), plotting.ACCENTS[1:], strict=False):
    left.axhline(bound, color=color, ls="--", lw=1.2, label=label)
left.legend(fontsize="small", frameon=False, loc="upper left", ncols=3)
left.set(
    title="Moonlight's size, random weights", ylim=(0, 1.15 * max(run["tokens_per_second"] for run in decoded.values()))
)
plotting.bars(right, list(small), {"tokens/s": np.array([rate for rate, _ in small.values()])})
right.set(title="kdt16m, trained, held-out texts")
right.get_legend().remove()
plt.show()
print(f"{'Moonlight size':16}{'tokens/s':>10}{'τ':>7}{'rounds/s':>10}{'τ to break even':>17}")
for name, run in decoded.items():
    rate, tau = run["tokens_per_second"], run["acceptance_length"]
    print(f"{name:16}{rate:10.1f}{tau:7.2f}{rate / tau:10.1f}{plain['tokens_per_second'] / rate * tau:17.2f}")
print(f"plain decoding is at {plain['tokens_per_second'] / bounds['floor of ar']:.0%} of its floor\n")
print(f"{'kdt16m':16}{'tokens/s':>10}{'τ':>7}")
for name, (rate, tau) in small.items():
    print(f"{name:16}{rate:10.1f}{tau:7.2f}")

print(f"\n{'a layer of Kimi K2':20}{'µs':>8}{'passes/s, 61 layers on 8 GPUs, on paper':>42}")
for layer in (Measured(**result) for result in model["results"] if "kernel" in result):
    print(f"{layer.case['rows']:3} rows{layer.microseconds:20.0f}{passes_per_second(layer.microseconds):42.0f}")

# %% [markdown]
# The last column of the first table is the price of guessing: a round with so many guesses takes so many times as long
# as a plain one. In a model with experts it rises with the rows, as the roofline said, since each row brings experts of
# its own. The trained drafter of the small model commits about four tokens a round with a chain and five with a tree,
# on texts it has never seen. Where a drafter commits more than the break-even, it pays; where it commits less, `auto`
# drafts less.
#
# Kimi K2 itself does not fit on one card. One of its layers does, with all 384 experts; 61 of them, each cut over eight
# cards, would make so many passes a second if the cards did not have to talk to each other. A pass of 17 rows costs
# three and a half of one row, so a tree has to commit that many tokens before it pays.
#
# ## What equal bits cost
#
# Our kernels promise that a row has the same bits alone and in any company. The order of a sum must not depend on the
# number of rows then, though the fastest cut does: few rows leave multiprocessors idle unless many warps share a sum.
# Here is a kernel that takes more parts for few rows, as a library would. It is `w4a16_mma` itself, in another
# geometry for each number of rows, beside the one that is shipped.


# %%
def find_device() -> Device:
    """A GPU, else the emulator, else NumPy."""
    try:
        return Device.named("cuda") if cuda_available() else find_compiler() and Device.named("emulated")
    except KernelError:
        return Device.named("cpu")


device, rng = find_device(), np.random.default_rng(7)
packed = quantize(rng.standard_normal((128, 512), np.float32))
weight = tile_weight(device.put(packed.qweight), device.put(packed.scales.astype(bfloat16)))
x = rng.standard_normal((16, 512), np.float32).astype(bfloat16)


def shipped(x: np.ndarray) -> np.ndarray:
    with device.running():
        return device.host(w4a16_mma(device.put(x), weight))


def by_rows(x: np.ndarray) -> np.ndarray:
    """The sum in 8 parts up to 4 rows, in 4 parts beyond; without a compiler, NumPy adds the parts."""
    count = 8 if len(x) <= 4 else 4
    if device.name == "cpu":
        columns = np.split(dequantize(untile_weight(weight)), count, axis=1)
        return sum(linear(part, tile(of)) for part, of in zip(np.split(x, count, axis=1), columns, strict=True))
    with device.running():
        return device.host(launch(device.put(x), weight, geometry_of(len(x), *weight.shape)._replace(parts=count)))


batches, unequal = (1, 2, 4, 8, 16), {}
for product in (shipped, by_rows):
    alone = np.concatenate([product(x[row : row + 1]) for row in range(len(x))])
    unequal[product.__name__] = [int((product(x[:rows]) != alone[:rows]).any(axis=1).sum()) for rows in batches]
    counts = ", ".join(f"{rows}: {count}" for rows, count in zip(batches, unequal[product.__name__], strict=True))
    print(f"{product.__name__:8} rows with other bits than alone, in a batch of {counts}")

# %% [markdown]
# And what would be won? Before the kernel had to keep one order for each weight, it was swept for the best geometry at
# each number of rows. Those times, against the shipped kernel's:

# %%
history = json.loads((folder() / "measurements" / "w4a16-steps.json").read_text(encoding="utf-8"))
shapes, some_rows = history["shapes"], history["rows"]
versions = {result["version"]: np.array(result["microseconds"]) for result in history["results"]}
free, early = versions["one barrier a step"], versions.pop("weights before its turn")
picked = np.isin(gemm.ROWS, some_rows)
shipped_times = [over_rows(products, "w4a16_mma", "shape", shape)[2][picked] for shape in shapes]
versions["one order, shipped"] = np.array(shipped_times)
cost = versions["one order, shipped"] / free - 1
versions["weights before its turn"] = early

figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
plotting.bars(axes, shapes, {f"M = {rows}": 100 * cost[:, i] for i, rows in enumerate(some_rows)})
axes.axhline(0, color=plotting.INK, lw=0.8)
axes.set(ylabel="% more time than the best cut")
plt.show()
print(f"median {np.median(cost):+.1%}, from {cost.min():+.1%} to {cost.max():+.1%}")

# %% [markdown]
# Equal bits are cheap, for a product: tiles, rows a block and the depth of the ring may follow the number of rows, as
# none of them is in the order of a sum. Only the number of parts is fixed for a weight. (The two series come from
# different runs and compilers, and two runs of one geometry already differ by up to 3 %; NOTES.md, beside the files,
# says more.) Attention pays more, as seen above: there each node reads its own keys.
#
# ## From the exact kernel to tensor cores
#
# The exact kernel of notebook 02 was the start. What did each step bring? Times are those of the best geometry that was
# found for each step and number of rows M, up to the last two, which have one order for all M.

# %%
figure, panels = plt.subplots(2, 1, figsize=(10, 6.4), layout="constrained")
labels = [fill(name, 11) for name in versions]
for axes, (shape, rows) in zip(panels, (("2048x7168", 1), ("7168x2048", 64)), strict=True):
    at = shapes.index(shape), some_rows.index(rows)
    plotting.waterfall(axes, labels, [times[at] for times in versions.values()])
    axes.set(ylabel="µs", title=f"{shape}, M = {rows}")
plt.show()
times = np.array(list(versions.values()))  # [versions, shapes, rows]
print(f"{'gain of each step':22}{'geometric mean':>15}{'least':>8}{'most':>8}")
for name, gain in zip(list(versions)[1:], times[:-1] / times[1:], strict=True):
    print(f"{name:22}{np.exp(np.log(gain).mean()):15.2f}{gain.min():8.2f}{gain.max():8.2f}")

# %% [markdown]
# - **Tensor cores** take bfloat16 rows, and weights that were put in the order of the instruction's operands when they
#   were loaded. A lane's codes are one load of 16 bytes, and one instruction multiplies 16 outputs by 8 rows. In this
#   version four blocks share an output's inputs, and the last to finish adds up.
# - **Warps share inputs**: the same cut within one block. Blocks were expected to be better from 8 rows on, since each
#   reads a quarter of `x`. They lost everywhere: what they write, wait for and read at the end costs more than that.
# - **Moving pointers**: the profiler counted nearly three times the instructions that the product needs. Each fetch had
#   computed its addresses anew; now a pointer moves on.
# - **Constant sizes**: the number of inputs is known when the kernel is compiled, short loops are unrolled, and wide
#   weights have fewer warps a block.
# - **One barrier a step**, and the fetch before the product, changed little in either direction.
# - **One order** is the price of equal bits, above.
# - **Weights before its turn**: recorded in a graph, a kernel may begin while the one before it ends, and a weight
#   is not what that one writes. So its first pieces are on their way when the launch would only begin. This is the
#   one step that helps between kernels; the peers' times above are of a graph too, but their kernels wait for each
#   other.
#
# Few of these gains were foreseen. NOTES.md keeps each prediction beside what came.
#
# ## Checks

# %%
for name, found in (("gemm", products), ("moe", experts), ("attention", attended)):
    assert all(one.microseconds >= one.floor(limits[name]) > 0 for one in found), f"{name}: no time is below its floor"
assert all(row.of_best_peer < 1 for row in table if row.case["rows"] <= 16), (
    "up to 16 rows no peer of the run is faster"
)
assert all(row.of_best_peer < 1 for row in of_layer["kimi-k2"]), "nor with Kimi K2's experts, at any number of rows"
of_trees = [row for found in of_prefix.values() for row in found if row.case["rows"] > 1]
assert all(row.of_best_peer < 1 for row in of_trees), "nor is torch for the attention of a tree"
reads = [limit.read_gb_per_s for limit in limits.values()]
assert max(reads) < 1.05 * min(reads), "the card read equally fast in all runs"

assert all(step.build + step.commit < step.verify for step in steps), "what is between draft and pass is small"
assert all(step.draft == step.build == 0 for step in steps if step.rows == 1), "plain decoding drafts nothing"
built = [time for name, time in tree_times.items() if name.startswith("tree_build")]
assert built == sorted(built), "a larger tree takes longer to build"
assert len({run["tokens"] for run in decoded.values()}) == 1, "every decoder wrote as many tokens"
assert plain["acceptance_length"] == 1, "plain decoding commits one token a pass"
assert plain["tokens_per_second"] <= bounds["floor of ar"], "and is not faster than memory"

assert unequal["shipped"] == [0] * len(batches), "a row's bits do not depend on its company"
assert unequal["by_rows"][:3] == [0, 0, 0], "nor do they while the cut stays the same"
assert min(unequal["by_rows"][3:]) > 0, "and they do as soon as it follows the number of rows"
assert np.median(cost) < 0.1, "one order of sums costs less than a tenth"
total = versions["exact, fp32"] / versions["one order, shipped"]
assert total.min() > 4, "tensor cores are worth several times the exact kernel in every case"
print(f"all checks hold; from the exact kernel to the shipped one: ×{total.min():.1f} to ×{total.max():.1f}")

# %% [markdown]
# ## Try it
#
# 1. Draw the roofline of your own card: `python -m kdtree_nb bench ceilings`, then `bench gemm --json FILE`. On which
#    side of the break is a tree of 32 nodes?
# 2. Kimi K2 has 384 experts of which a token takes 8. From `expected_experts`: how many rows read half of them? What
#    does that say about a tree of 64 nodes?
# 3. Let `by_rows` choose 16 parts for a single row. Which rows differ now, and by how much?
#
# ## Where next
#
# | | |
# |---|---|
# | [04 · Wiring the engine](04_engine_wiring.ipynb) | what unequal bits could do to a text |
# | [08 · Real checkpoints](08_real_checkpoints.ipynb) | the same bytes, on disk and over the bus |
# | `golden/measurements/NOTES.md` | every kernel's story, with the predictions that failed |
