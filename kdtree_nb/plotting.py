"""Figures of this project: each function takes arrays, draws on the Axes it is given, and returns them."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from kdtree_nb.reference import tree_svg

INK, QUIET = "#1f3a5f", "#9aa5b1"
ACCENTS = ("#1f77b4", "#d95f02", "#1b9e77", "#7570b3", "#e7298a")


def logit_differences(axes: Axes, differences: Mapping[str, np.ndarray]) -> Axes:
    """Largest |logit difference| of each token, one line a prompt, on a logarithmic scale.

    Parameters
    ----------
    differences : mapping from label to float [tokens]
    """
    for (label, values), color in zip(differences.items(), _colors(len(differences)), strict=True):
        axes.semilogy(np.arange(1, len(values) + 1), np.maximum(values, 1e-9), ".-", color=color, label=label, lw=1)
    axes.set(xlabel="new token", ylabel="max |Δ logit|")
    axes.legend(fontsize="small")
    return _clean(axes)


def accepted_per_round(axes: Axes, accepted: Mapping[str, Sequence[int]]) -> Axes:
    """Tokens committed by each target forward, one step line a run; plain decoding is the line at 1.

    Parameters
    ----------
    accepted : mapping from label to the drafts accepted in each round
    """
    for (label, values), color in zip(accepted.items(), _colors(len(accepted)), strict=True):
        committed = np.asarray(values) + 1
        axes.step(np.arange(1, len(committed) + 1), committed, where="mid", color=color, label=label, lw=1.3)
    axes.axhline(1, color=QUIET, lw=1, ls="--")
    axes.set(xlabel="round (target forward)", ylabel="tokens committed", ylim=(0, None))
    axes.legend(fontsize="small")
    return _clean(axes)


def rounds(axes: Axes, accepted: Mapping[str, Sequence[int]]) -> Axes:
    """A row of text a run, cut into its rounds: the wider and darker a piece, the more one target forward committed.

    Parameters
    ----------
    accepted : mapping from label to the drafts accepted in each round
    """
    most = max(max(values) for values in accepted.values()) + 1
    for row, values in enumerate(accepted.values()):
        committed = np.asarray(values) + 1
        starts = np.cumsum(committed) - committed
        colors = [(0.12, 0.23, 0.37, 0.15 + 0.85 * count / most) for count in committed]
        axes.barh(row, committed, left=starts, height=0.7, color=colors, edgecolor="white", lw=1)
    labels = [f"{label}\n{len(values)} forwards" for label, values in accepted.items()]
    axes.set_yticks(range(len(labels)), labels)
    axes.set(xlabel="new token", xlim=(0, None), ylim=(len(labels) - 0.5, -0.5))
    axes.spines[["top", "right", "left"]].set_visible(False)
    return axes


def curves(axes: Axes, x: np.ndarray, values: Mapping[str, np.ndarray], style: str = "-") -> Axes:
    """One line a label over a common x.

    Parameters
    ----------
    x : float [n]
    values : mapping from label to float [n]
    style : str
        Matplotlib's line and marker, such as ``"o-"``.
    """
    for (label, y), color in zip(values.items(), _colors(len(values)), strict=True):
        axes.plot(x, y, style, color=color, label=label, lw=1.4, ms=4)
    axes.legend(fontsize="small", edgecolor="none")
    return _clean(axes)


def bars(axes: Axes, labels: Sequence[str], values: Mapping[str, np.ndarray]) -> Axes:
    """Groups of bars, a group for each label and a colour for each series.

    Parameters
    ----------
    values : mapping from series to float [labels]
    """
    width = 0.8 / len(values)
    for i, ((series, heights), color) in enumerate(zip(values.items(), _colors(len(values)), strict=True)):
        axes.bar(
            np.arange(len(labels)) + (i - (len(values) - 1) / 2) * width, heights, width, color=color, label=series
        )
    axes.set_xticks(range(len(labels)), labels)
    axes.legend(fontsize="small", frameon=False)
    return _clean(axes)


def rounded_group(axes: Axes, weights: np.ndarray, codes: np.ndarray, scale: float) -> Axes:
    """A group's weights before and after rounding, over the 16 values that its scale can express.

    Parameters
    ----------
    weights : float [group]
    codes : int [group]
    """
    positions = np.arange(len(weights))
    for code in range(-8, 8):
        axes.axhline(code * scale, color="#e6e9ed", lw=0.8, zorder=0)
    axes.vlines(positions, weights, codes * scale, color=ACCENTS[1], lw=1.6, label="error")
    axes.plot(positions, weights, "o", color=INK, ms=4.5, label="weight")
    axes.plot(positions, codes * scale, "_", color=ACCENTS[1], ms=9, mew=1.6, label="code · scale")
    axes.set(xlabel="element of the group", ylabel="value", xlim=(-1, len(weights)))
    right = axes.twinx()
    low, high = axes.get_ylim()
    right.set(ylabel="code", ylim=(low / scale, high / scale), yticks=range(-8, 8, 2))
    right.spines["top"].set_visible(False)
    axes.spines["top"].set_visible(False)
    axes.legend(fontsize="small", ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False)
    return axes


def error_of_peaks(axes: Axes, peaks: np.ndarray, errors: np.ndarray, predicted: np.ndarray) -> Axes:
    """Each group's relative error over its peak, as a density, with a prediction as a line.

    Parameters
    ----------
    peaks, errors, predicted : float [groups]
    """
    order = np.argsort(peaks)
    axes.hexbin(peaks, errors, gridsize=45, bins="log", cmap="Blues", mincnt=1, linewidths=0.1)
    axes.plot(peaks[order], predicted[order], color=ACCENTS[1], lw=1.4, label="peak / (7.5 · √12)")
    axes.set(xlabel="largest |weight| / rms of the group", ylabel="rms error / rms of the group", ylim=(0, None))
    axes.legend(fontsize="small", frameon=False)
    return _clean(axes)


def shares(axes: Axes, parts: Mapping[str, Mapping[str, float]], unit: str) -> Axes:
    """Horizontal bars, each cut into its parts, largest parts first and labelled where there is room.

    Parameters
    ----------
    parts : mapping from bar to mapping from part to size
    """
    names = list(dict.fromkeys(part for bar in parts.values() for part in bar))
    longest = max(sum(bar.values()) for bar in parts.values())
    ends = np.zeros(len(parts))
    for name, color in zip(names, _colors(len(names)), strict=True):
        sizes = np.array([bar.get(name, 0.0) for bar in parts.values()])
        drawn = axes.barh(list(parts), sizes, left=ends, color=color, label=name, height=0.6)
        texts = ["" if size < 0.04 * longest else f"{size:,.0f}" if size >= 100 else f"{size:.3g}" for size in sizes]
        axes.bar_label(drawn, texts, label_type="center", color="white", fontsize="small")
        ends += sizes
    axes.invert_yaxis()
    axes.set(xlabel=unit)
    axes.legend(fontsize="small", ncols=len(names), loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False)
    _clean(axes).grid(visible=False)
    return axes


def labelled_points(axes: Axes, x: np.ndarray, y: np.ndarray, labels: Sequence[str]) -> Axes:
    """Points with their names beside them.

    Parameters
    ----------
    x, y : float [n]
    """
    axes.plot(x, y, "o", color=ACCENTS[0], ms=5)
    for at, label in zip(zip(x, y, strict=True), labels, strict=True):
        axes.annotate(label, at, xytext=(6, 3), textcoords="offset points", fontsize="small", color=INK)
    return _clean(axes)


def surprise(axes: Axes, labels: Sequence[str], bits: np.ndarray) -> Axes:
    """What each token of a text cost, the token written below its bar.

    Parameters
    ----------
    labels : [tokens]
    bits : float [tokens]
        −log₂ of the probability that the token had.
    """
    axes.bar(range(len(bits)), bits, color=ACCENTS[0], width=0.75)
    axes.set_xticks(range(len(bits)), labels, rotation=90, family="monospace", fontsize="small")
    axes.set(ylabel="surprise [bits]", xlim=(-0.7, len(bits) - 0.3))
    axes.tick_params(axis="x", length=0)
    return _clean(axes)


def heatmap(axes: Axes, values: np.ndarray, label: str) -> Axes:
    """A matrix as shades, 0 the lightest, with their scale beside it.

    Parameters
    ----------
    values : float [rows, columns]
    label : str
        What the shades measure.
    """
    image = axes.imshow(values, cmap="Blues", aspect="auto", vmin=0)
    axes.figure.colorbar(image, ax=axes, label=label, pad=0.02)
    axes.spines[:].set_visible(False)
    return axes


def cache_per_token(axes: Axes, full: Mapping[str, float], latent: Mapping[str, float]) -> Axes:
    """Bytes a token adds to the cache, full heads against latent, a row each model, on a logarithmic scale.

    Parameters
    ----------
    full, latent : mapping from model to bytes
    """
    for row, name in enumerate(full):
        axes.plot([latent[name], full[name]], [row, row], color=QUIET, lw=2, zorder=1)
        middle = (latent[name] * full[name]) ** 0.5
        axes.annotate(
            f"{full[name] / latent[name]:.1f}×", (middle, row), xytext=(0, 5), textcoords="offset points", ha="center"
        )
    for values, color, label in ((latent, ACCENTS[2], "latent + rotated key"), (full, ACCENTS[1], "full heads")):
        axes.plot(list(values.values()), range(len(values)), "o", color=color, ms=8, label=label)
    axes.set(xscale="log", xlabel="bytes per token, bfloat16", ylim=(len(full) - 0.5, -0.6))
    axes.set_yticks(range(len(full)), list(full))
    axes.legend(fontsize="small", ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False)
    _clean(axes).grid(axis="x", color="#e6e9ed", lw=0.8)
    return axes


def differences_by_model(axes: Axes, differences: Mapping[str, np.ndarray], tolerance: float) -> Axes:
    """Largest |logit difference| of every token, one column of points a model, on a logarithmic scale.

    Parameters
    ----------
    differences : mapping from model to float [tokens]
    tolerance : float
        What is asked of every token.
    """
    for column, values in enumerate(differences.values()):
        spread = np.linspace(-0.3, 0.3, len(values))
        axes.semilogy(column + spread, np.maximum(values, 1e-9), ".", color=ACCENTS[0], ms=3)
    axes.axhline(tolerance, color=ACCENTS[1], lw=1.2, ls="--", label="asked of every token")
    axes.set_xticks(range(len(differences)), list(differences))
    axes.set(ylabel="max |Δ logit|", ylim=(None, 5 * tolerance))
    axes.legend(fontsize="small", frameon=False, loc="upper right")
    return _clean(axes)


def tokens_over_forwards(axes: Axes, accepted: Mapping[str, Sequence[int]]) -> Axes:
    """Tokens written by then over the target's forward passes, one line a run; its slope is τ.

    Parameters
    ----------
    accepted : mapping from label to the drafts accepted in each round
    """
    for (label, values), color in zip(accepted.items(), _colors(len(accepted)), strict=True):
        written = np.cumsum([0, *(np.asarray(values) + 1)])
        axes.plot(written, color=color, label=label, lw=1.4)
    axes.set(xlabel="target forwards", ylabel="tokens written", xlim=(0, None), ylim=(0, None))
    axes.legend(fontsize="small", frameon=False)
    return _clean(axes)


def draft_tree(axes: Axes, labels: Sequence[str], parents: np.ndarray, path: Sequence[int], bonus: str) -> Axes:
    """A draft tree from left to right, the accepted path and the bonus token in colour.

    Parameters
    ----------
    labels : [N]
        Text of each node, the root first.
    parents : int [N]
        A parent's index is smaller than its child's; −1 for the root.
    path : node indices
        The accepted nodes in order, root first.
    """
    parents = np.append(parents, path[-1])  # the bonus token is drawn as a child of the last accepted node
    places = tree_svg.tree_layout(parents)
    depths, heights = np.array([places[node] for node in range(len(parents))]).T
    styles = {
        "drafted": (QUIET, "white", QUIET),
        "accepted": (INK, "white", ACCENTS[2]),
        "bonus": ("white", ACCENTS[1], ACCENTS[1]),
    }
    for node, label in enumerate([*labels, bonus]):
        kind = "bonus" if node == len(labels) else "accepted" if node in path else "drafted"
        text, fill, edge = styles[kind]
        if node:
            (start, end), (top, bottom) = (values[[parents[node], node]] for values in (depths, heights))
            bend, kept = start + 0.45, kind != "drafted"
            line = ":" if kind == "bonus" else "-"
            axes.plot(
                [start, bend, bend, end], [top, top, bottom, bottom], line, color=edge, lw=1 + kept, zorder=1 + kept / 2
            )
        box = {"boxstyle": "round,pad=0.3", "fc": fill, "ec": edge, "lw": 1.4}
        at = depths[node], heights[node]
        axes.text(*at, label, ha="center", va="center", family="monospace", color=text, bbox=box)
    axes.set(xlabel="depth", xlim=(-0.4, depths.max() + 0.4), ylim=(heights.max() + 0.7, -0.7), yticks=[])
    axes.set_xticks(range(int(depths.max()) + 1))
    axes.spines[["left", "right", "top"]].set_visible(False)
    return axes


def layer_differences(axes: Axes, differences: Mapping[str, np.ndarray]) -> Axes:
    """Difference of each layer's output and, last, of the logits: one line a pair, on a logarithmic scale.

    Parameters
    ----------
    differences : mapping from label to float [layers + 1]
    """
    longest = max(map(len, differences.values()))
    for (label, values), color in zip(differences.items(), _colors(len(differences)), strict=True):
        axes.semilogy(np.maximum(values, 1e-9), "o-", color=color, label=label, lw=1.2, ms=4)
    axes.set_xticks(range(longest), [*map(str, range(longest - 1)), "logits"])
    axes.set(xlabel="layer")
    axes.legend(fontsize="small", frameon=False)
    return _clean(axes)


def sectors(axes: Axes, addresses: np.ndarray, size: int) -> Axes:
    """What a warp's request asks of memory: a line a sector of 32 bytes, each word with the lane that asked for it.

    Parameters
    ----------
    addresses : int [lanes]
        Of the first byte of each lane, a multiple of 4.
    size : int
        Bytes a lane, a multiple of 4.
    """
    words = addresses[:, None] // 4 + np.arange(size // 4)
    lines, line = np.unique(words // 8, return_inverse=True)
    lane_of = np.full((len(lines), 8), np.nan)
    lane_of[line.reshape(words.shape), words % 8] = np.arange(len(addresses))[:, None]
    axes.imshow(np.where(np.isnan(lane_of), 0.12, np.nan), cmap="Greys", vmin=0, vmax=1, aspect="auto")
    axes.imshow(lane_of, cmap="viridis", vmin=0, vmax=len(addresses), aspect="auto")
    for (row, column), lane in np.ndenumerate(lane_of):
        if not np.isnan(lane):
            color = "white" if lane < 0.7 * len(addresses) else INK
            axes.text(column, row, f"{lane:.0f}", ha="center", va="center", fontsize=6, color=color)
    axes.hlines(np.arange(len(lines) + 1) - 0.5, -0.5, 7.5, color="white", lw=1.5)
    axes.set(xlabel="word of the sector", ylabel="sector sent", xticks=range(8))
    axes.set_yticks([0, len(lines) - 1], ["1", str(len(lines))])
    axes.spines[:].set_visible(False)
    return axes


def floors(
    axes: Axes,
    rows: np.ndarray,
    lines: Mapping[str, np.ndarray],
    measured_rows: np.ndarray,
    measured: Mapping[str, Sequence[float]],
) -> Axes:
    """Lower bounds of a product's time as lines over its rows, and measured times as points.

    Parameters
    ----------
    rows : float [n]
    lines : mapping from label to float [n]
    measured_rows : int [m]
    measured : mapping from label to float [m]
    """
    for (label, values), color in zip(lines.items(), _colors(len(lines)), strict=True):
        axes.loglog(rows, values, color=color, lw=1.8, label=label)
    for (label, times), marker in zip(measured.items(), "os^D*v", strict=False):
        axes.loglog(measured_rows, times, marker, ms=6, color=INK, mfc="white", mew=1.2, label=label)
    ticks = 2 ** np.arange(int(np.log2(rows[-1])) + 1)
    axes.set_xticks(ticks, map(str, ticks), minor=False)
    axes.set_xticks([], minor=True)
    axes.set_yticks(times := [1, 2, 5, 10, 20, 50, 100, 200], map(str, times))
    axes.set_yticks([], minor=True)
    axes.set(xlabel="rows")
    axes.legend(fontsize="small", frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return _clean(axes)


def _colors(count: int) -> list[str]:
    return [ACCENTS[i % len(ACCENTS)] for i in range(count)]


def _clean(axes: Axes) -> Axes:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e9ed", lw=0.8)
    axes.set_axisbelow(True)
    return axes


def visibility(axes: Axes, visible: np.ndarray, labels: Sequence[str]) -> Axes:
    """Which rows of a tree each row attends to, besides the prefix.

    Parameters
    ----------
    visible : bool [N, N]
    labels : [N]
        Of the rows, in their order.
    """
    axes.imshow(visible, cmap="Blues", vmin=0, vmax=1.4)
    edges = np.arange(len(labels) + 1) - 0.5
    axes.vlines(edges, edges[0], edges[-1], color="#e6e9ed", lw=0.8)
    axes.hlines(edges, edges[0], edges[-1], color="#e6e9ed", lw=0.8)
    axes.set_xticks(range(len(labels)))
    axes.set_yticks(range(len(labels)), labels, family="monospace")
    axes.set(xlabel="slot that is seen", ylabel="row")
    axes.tick_params(length=0, labelsize="small")
    axes.spines[:].set_visible(False)
    return axes
