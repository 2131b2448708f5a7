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
# # 02 · The W4A16 kernel
#
# A layer's product takes a few rows of activations and a matrix of weights in four bits. Almost all of its time goes
# into moving the weights. This notebook goes in four steps from the plain loop to the kernel that is shipped, and asks
# the same two questions at each: what is moved, and what is computed?
#
# *You need* [01 · Weights of four bits](01_quantization.ipynb) for the format. That a GPU runs threads in warps of 32,
# and warps in blocks, is all the CUDA that is assumed.
#
# *You will learn* what a warp's request costs; why rows should share a weight; what shared memory is for; what makes a
# kernel row-invariant; and where the floor is on an H200.
#
# *Runs in* about 10 s on a laptop, and as much again the first time, when kernels compile. GPU optional: without one,
# the CUDA sources run in the emulator; without a C++ compiler either, the specification stands in for them.

# %%
import json
from functools import partial
from importlib.resources import files

import matplotlib.pyplot as plt
import numpy as np

from kdtree_nb import plotting
from kdtree_nb.engine.device import Device, cuda_available
from kdtree_nb.golden import folder
from kdtree_nb.kernels.emulator.build import KernelError, find_compiler
from kdtree_nb.kernels.launch import Kernel
from kdtree_nb.kernels.w4a16_gemm import w4a16_gemm
from kdtree_nb.quantization import dequantize, quantize
from kdtree_nb.reference.linear import linear, tile

plt.rcParams["figure.dpi"] = 120


def find_device() -> Device:
    """A GPU, else the emulator, else NumPy."""
    try:
        return Device.named("cuda") if cuda_available() else find_compiler() and Device.named("emulated")
    except KernelError:
        return Device.named("cpu")


device, teaching = find_device(), folder().parent / "notebooks" / "kernels"

# %% [markdown]
# ## The task
#
# `y = x · dequantize(qweight, scales)ᵀ`. A word of `qweight` holds 8 codes from 0 to 15, the first in its lowest
# bits; a code less 8, times the scale that 32 inputs share, is the weight. Sizes are small here, and awkward on
# purpose: 11 rows, 40 outputs and 288 inputs fill no block, no warp and no tile.

# %%
rng = np.random.default_rng(2)
x = rng.standard_normal((11, 288), np.float32)
weight = quantize(rng.standard_normal((40, 288), np.float32))
exact = x.astype(np.float64) @ dequantize(weight).T.astype(np.float64)

by_hand, words = 0.0, weight.qweight[3].view(np.uint32)
for i in range(288):
    code = int(words[i // 8]) >> 4 * (i % 8) & 15
    by_hand += (code - 8) * float(weight.scales[3, i // 32]) * float(x[5, i])
print(f"y[5, 3] by hand {by_hand:.4f}, in NumPy {exact[5, 3]:.4f}")

# %% [markdown]
# ## Step 1: a thread an output
#
# The loop above, and a thread for each element of `y`. Every step is a file of its own beside this notebook, and is
# launched as the package launches its kernels.

# %%
print((teaching / "thread_per_output.cu").read_text(encoding="utf-8"))


# %%
def launch(kernel: Kernel, outputs_a_block: int, rows_a_block: int, x: np.ndarray) -> np.ndarray:
    """x · weightᵀ by one of this notebook's kernels."""
    if device.name == "cpu":
        return linear(x, tile(dequantize(weight)))
    rows, out_features = len(x), len(weight.qweight)
    y = device.put(np.empty((rows, out_features), np.float32))
    grid = (-(-out_features // outputs_a_block), -(-rows // rows_a_block))
    arrays = (device.put(x), device.put(weight.qweight), device.put(weight.scales), y)
    with device.running():
        kernel(grid, (128,), (*arrays, np.int32(rows), np.int32(out_features), np.int32(weight.shape[1])))
    return device.host(y)


def check(name: str, product) -> None:
    """The result is right, and a row's bits are the same whatever rows are beside it."""
    y = product(x)
    right = np.abs(y - exact).max() < 1e-5 * np.abs(exact).max()
    ways = [product(x[first:last])[-1] for first, last in ((10, 11), (9, 11), (3, 11), (2, 11))]
    results[name] = right, all(np.array_equal(way, y[10]) for way in ways)
    print("{}: right {}, row-invariant {}".format(name, *results[name]))


results: dict[str, tuple[bool, bool]] = {}
check("a thread an output", partial(launch, Kernel(teaching / "thread_per_output.cu"), 128, 1))

# %% [markdown]
# It is right. What does it move? A warp is the unit that asks memory, and memory answers in *sectors* of 32 bytes. In
# this kernel the 32 lanes of a warp work on 32 outputs, so in each step they ask for 32 words that lie a whole row of
# the weight apart.
#
# ## Step 2: a warp an output
#
# Let the 32 lanes share one output and take neighbouring words. Each ends with a sum over its own inputs, and five
# shuffles add the 32 sums.

# %%
source = (teaching / "warp_per_output.cu").read_text(encoding="utf-8")
print(source[source.index("    float sum") :])
check("a warp an output", partial(launch, Kernel(teaching / "warp_per_output.cu"), 4, 1))

# %% [markdown]
# What do a warp's lanes ask for at once? Each line below is a sector that memory has to send, with the lane that asked
# for each of its 8 words; what no lane asked for is grey. The third panel is the kernel that is shipped, see below: 16
# bytes a lane, and 8 lanes an output.

# %%
ROW = 7168 // 2  # bytes of a row of packed weights, in a projection of Kimi K2
lanes = np.arange(32)
requests = {
    "a thread an output": (lanes * ROW, 4),
    "a warp an output": (lanes * 4, 4),
    "shipped": (lanes // 8 * ROW + lanes % 8 * 16, 16),
}
sectors = {}
figure, panels = plt.subplots(1, 3, figsize=(10, 4.6), layout="constrained")
for axes, (name, (addresses, size)) in zip(panels, requests.items(), strict=True):
    sectors[name] = len(np.unique((addresses[:, None] + np.arange(size)) // 32))
    plotting.sectors(axes, addresses, size)
    axes.set_title(f"{name}\n{32 * size} of {32 * sectors[name]} bytes asked for", fontsize="medium")
plt.show()
print(sectors)

# %% [markdown]
# In the first kernel seven eighths of what is sent was not asked for. Later steps of the loop will want it, and may
# find it in a cache, or may not. In the second nothing is left over. In the third neither, and a warp has four
# times as many bytes under way with one instruction. That counts: to keep an H200's memory busy, about 25 KB have to be
# under way on each of its 132 multiprocessors at any time, and the few warps of a small product are all there is to
# ask.
#
# ## Step 3: eight rows share a weight
#
# Both kernels read and unpack the whole weight for each row of `x`. A draft tree has many rows, so keep a sum for
# each of 8 rows, and use a weight 8 times once it is in a register.

# %%
source = (teaching / "eight_rows.cu").read_text(encoding="utf-8")
print(source[source.index("    float sum") :])
check("eight rows", partial(launch, Kernel(teaching / "eight_rows.cu"), 4, 8))

# %% [markdown]
# Are rows still independent? The 8 sums never meet, and the order of each depends on the number of inputs alone. That
# is what row invariance asks for. [04 · Wiring the engine](04_engine_wiring.ipynb) shows what happens without.
#
# ## Step 4: what is shipped
#
# Now `x` is what is read too often. Every warp reads the inputs of its rows, for one output. So a block of 256 threads
# takes 32 outputs, and stages `x` in shared memory for all of them. A lane takes a whole *group* at a time: 32 codes
# are 16 bytes, one load, with one scale. 8 slices of the inputs work side by side, and each thread ends by adding the
# 8 slices' sums of one element. Here is the file, and the heart of the header that all products share.
# (`wait_for_turn` is a matter of whole rounds: there a kernel may begin while the one before it ends, see
# [07 · Performance](07_performance.ipynb).)

# %%
package = files("kdtree_nb.kernels")
source = (package / "w4a16_gemm.cu").read_text(encoding="utf-8")
print(source[source.index('extern "C"') :])
header = (package / "include" / "gemm.cuh").read_text(encoding="utf-8")
start = header.index("    __shared__ float staged")
print(header[start : header.index("\n}\n", start) + 2])


# %%
def shipped(x: np.ndarray) -> np.ndarray:
    with device.running():
        return device.host(w4a16_gemm(*map(device.put, (x, weight.qweight, weight.scales))))


check("shipped", shipped)

# %% [markdown]
# One number in it looks odd: a staged group's place is 32 · 8 + 4 floats long. Shared memory has 32 banks of 4 bytes,
# and lanes that want different addresses of one bank wait for each other. 8 slices read the same element of 8
# groups, and each reads the values of 8 rows, four floats at a time. Which banks do they meet?

# %%
slices = np.arange(8)
for stride in (256, 260):
    banks = (slices[:, None] * stride + np.arange(4)) % 32
    print(f"stride {stride}: {len(np.unique(banks)):2} banks for {banks.size} floats")

# %% [markdown]
# ## What is moved, what is computed
#
# Count it for a projection of Kimi K2, 4,096 outputs by 7,168 inputs with bfloat16 scales, and 8 rows. A byte counts as
# often as a warp's request asks for it; lanes that ask for the same address count once. Unpacking a code takes a
# shift, a mask, a subtraction, a conversion and a multiplication.

# %%
OUT, IN, ROWS = 4096, 7168, 8
packed, inputs = OUT * IN * 0.5625, IN * 4  # bytes of the weight, and of one row of x
costs = {  # bytes of weights, bytes of x, codes unpacked
    "a thread an output": (ROWS * packed, ROWS * OUT / 32 * inputs, ROWS * OUT * IN),
    "a warp an output": (ROWS * packed, ROWS * OUT * inputs, ROWS * OUT * IN),
    "eight rows": (packed, ROWS * OUT * inputs, OUT * IN),
    "shipped": (packed, ROWS * OUT / 32 * inputs, OUT * IN),
}
print(f"{'':20}{'weights MB':>11}{'x MB':>8}{'unpacking Mop':>15}{'product Mop':>13}")
for name, (weights_read, x_read, codes) in costs.items():
    millions = [count / 1e6 for count in (weights_read, x_read, 5 * codes, 2 * ROWS * OUT * IN)]
    print("{:20}{:11.1f}{:8.1f}{:15.1f}{:13.1f}".format(name, *millions))

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3), layout="constrained")
names = [name.replace(" an ", "\nan ").replace("eight ", "eight\n") for name in costs]
moved = np.array([cost[:2] for cost in costs.values()]).T / 1e6
plotting.bars(left, names, {"weights": moved[0], "x": moved[1]}).set(
    ylabel="MB asked for", yscale="log", ylim=(5, None)
)
operations = np.array([[5 * codes, 2 * ROWS * OUT * IN] for *_, codes in costs.values()]).T / 1e6
plotting.bars(right, names, {"unpacking": operations[0], "product": operations[1]}).set(ylabel="million operations")
plt.show()

# %% [markdown]
# Each step removes one thing. The warp makes the requests whole, though each output now asks for its own copy of `x`.
# Eight rows divide weights and unpacking by 8. Staging divides what is read of `x` by 32, and leaves the rest to shared
# memory, which is near. What remains is the weight, once, and the product itself.
#
# With more than 8 rows the weight is read once for each 8 of them. Blocks that differ only in their rows are
# neighbours in the grid, so they run together, and all but the first are likely to find it in the L2 cache.
#
# ## The floor
#
# How fast could any kernel be on an H200? It has to read the weight once, and to do two operations for each weight
# and row. The slower of the two is the floor. Both ceilings were measured, on one card and in one run with all that
# follows (`bench gemm --peers`); for float32 without tensor cores NVIDIA states 67 TFLOP/s.

# %%
measured = json.loads((folder() / "measurements" / "gemm-h200.json").read_text(encoding="utf-8"))
READ, TENSOR = measured["ceilings"]["read_gb_per_s"] * 1e9, measured["ceilings"]["bf16_tflop_per_s"] * 1e12
FLOAT32, measured_rows = 67e12, np.array([1, 8, 16, 32, 64])
print(f"{measured['device']}, {measured['date']}: read {READ / 1e9:,.0f} GB/s, bfloat16 {TENSOR / 1e12:.0f} TFLOP/s")

rows = np.geomspace(1, 256, 100)
reading = {name: size * OUT * IN / READ * 1e6 for name, size in (("INT4", 0.5625), ("bfloat16", 2.0))}
floors = {
    "INT4, float32 arithmetic": np.maximum(reading["INT4"], 2 * rows * OUT * IN / FLOAT32 * 1e6),
    "INT4, tensor cores": np.maximum(reading["INT4"], 2 * rows * OUT * IN / TENSOR * 1e6),
    "bfloat16, tensor cores": np.maximum(reading["bfloat16"], 2 * rows * OUT * IN / TENSOR * 1e6),
}
times: dict[str, list[float]] = {}
for result in measured["results"]:
    if result["case"]["shape"] == f"{OUT}x{IN}":
        times.setdefault(result["kernel"], []).append(result["microseconds"])

# %%
figure, axes = plt.subplots(figsize=(9, 4.2), layout="constrained")
plotting.floors(axes, rows, floors, measured_rows, times)
axes.set(ylabel="µs for 4,096 × 7,168")
plt.show()
for name, floor in reading.items():
    print(f"{name}: {floor:.2f} µs to read the weight")
for name, rate in (("float32", FLOAT32), ("tensor cores", TENSOR)):
    print(f"{name}: reading is the floor up to {rate * 0.5625 / 2 / READ:.1f} rows")

# %% [markdown]
# Lines are arithmetic, points are measured: replays of a CUDA graph over copies of the weight that no cache holds,
# medians of one run. `w4a16_gemm` is the kernel of this notebook; the others are public, but for `w4a16_mma`. Four
# things to see.
#
# - INT4 lowers the floor 3.6 times against bfloat16. But at one row no public kernel comes closer to the new floor than
#   a factor of three: a product of 4 µs is over before memory is busy.
# - Up to about 50 rows, tensor cores wait for the weight. A draft tree of 17 or 33 rows has the floor of a single one.
#   For weights that all rows share, this is why checking a tree is cheap. Experts are another matter, as more rows
#   choose more of them.
# - Exact float32 leaves the floor at 4 rows, and the kernel of this notebook is far above even that. It is the
#   specification's companion, made for equal bits on every device, not for the last microsecond: eight slices of a row
#   in a block keep too few bytes under way, and each weight is unpacked for 8 rows at most.
# - `w4a16_mma` is what comes of the same idea with bfloat16 inputs, tensor cores, and weights put in the order of their
#   fragments when they are loaded. It is row-invariant too. `golden/measurements/NOTES.md` tells its story, with every
#   prediction that failed.
#
# ## Checks

# %%
for name, (right, invariant) in results.items():
    assert right, f"{name}: the product is right to float32's last bits"
    assert invariant, f"{name}: a row's bits do not depend on its company"
assert len(results) == 4, "all four steps were checked"
assert abs(by_hand - exact[5, 3]) < 1e-5, "the loop by hand is the product"
assert sectors["a warp an output"] * 32 == 32 * 4, "a warp's request is whole sectors"
assert sectors["shipped"] * 32 == 32 * 16, "and so is that of the shipped kernel, four times as large"
assert sectors["a thread an output"] == 32, "a thread an output needs a sector a lane"
assert weight.qweight.nbytes + weight.scales.nbytes == 40 * 288 * 0.625, "float32 scales: 0.625 byte a weight"
assert packed == OUT * IN // 2 + OUT * IN // 32 * 2, "bfloat16 scales: 0.5625"
assert all(min(own) > reading["INT4"] for own in times.values()), "no measured time is below the floor"
public = [own for name, own in times.items() if not name.startswith("w4a16")]
best = np.min(public, axis=0)
assert (np.array(times["w4a16_mma"])[:3] <= 0.7 * best[:3]).all(), "up to 16 rows, 0.7 of the best public time"
print("all checks hold")

# %% [markdown]
# ## Try it
#
# 1. Copy `w4a16_gemm.cu` with `gemm.cuh` in it, remove one `__syncthreads()`, and launch it in the emulator with the
#    environment variable `KDTREE_SCHEDULE=reverse`. Does the result
#    show each of them? Which order of threads would?
# 2. Give `eight_rows` 16 rows. What grows, apart from the sums?
# 3. Let two warps share an output when there are few rows, and add their halves with `atomicAdd`. Does `check` notice?
#
# ## Where next
#
# | | |
# |---|---|
# | [04 · Wiring the engine](04_engine_wiring.ipynb) | where this product is called, and what row invariance is worth |
# | [01 · Weights of four bits](01_quantization.ipynb) | the format, and what its rounding costs |
