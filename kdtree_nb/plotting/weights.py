"""Rounding to INT4, and what reading and multiplying such weights costs."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from kdtree_nb.plotting.style import ACCENTS, INK, clean, colors, plain_numbers


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
    return clean(axes)


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
    for (label, values), color in zip(lines.items(), colors(len(lines)), strict=True):
        axes.loglog(rows, values, color=color, lw=1.8, label=label)
    for (label, times), marker in zip(measured.items(), "os^D*v", strict=False):
        axes.loglog(measured_rows, times, marker, ms=6, color=INK, mfc="white", mew=1.2, label=label)
    ticks = 2 ** np.arange(int(np.log2(rows[-1])) + 1)
    axes.set_xticks(ticks, map(str, ticks), minor=False)
    axes.set_xticks([], minor=True)
    plain_numbers(axes.yaxis)
    axes.set(xlabel="rows")
    axes.legend(fontsize="small", frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return clean(axes)
