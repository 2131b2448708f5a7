"""Lines, bars and shades of any numbers."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from kdtree_nb.plotting.style import ACCENTS, INK, clean, colors


def curves(axes: Axes, x: np.ndarray, values: Mapping[str, np.ndarray], style: str = "-") -> Axes:
    """One line a label over a common x.

    Parameters
    ----------
    x : float [n]
    values : mapping from label to float [n]
    style : str
        Matplotlib's line and marker, such as ``"o-"``.
    """
    for (label, y), color in zip(values.items(), colors(len(values)), strict=True):
        axes.plot(x, y, style, color=color, label=label, lw=1.4, ms=4)
    axes.legend(fontsize="small", edgecolor="none")
    return clean(axes)


def bars(axes: Axes, labels: Sequence[str], values: Mapping[str, np.ndarray]) -> Axes:
    """Groups of bars, a group for each label and a colour for each series.

    Parameters
    ----------
    values : mapping from series to float [labels]
    """
    width = 0.8 / len(values)
    for i, ((series, heights), color) in enumerate(zip(values.items(), colors(len(values)), strict=True)):
        axes.bar(
            np.arange(len(labels)) + (i - (len(values) - 1) / 2) * width, heights, width, color=color, label=series
        )
    axes.set_xticks(range(len(labels)), labels)
    axes.legend(fontsize="small", frameon=False)
    return clean(axes)


def shares(axes: Axes, parts: Mapping[str, Mapping[str, float]], unit: str) -> Axes:
    """Horizontal bars, each cut into its parts, largest parts first and labelled where there is room.

    Parameters
    ----------
    parts : mapping from bar to mapping from part to size
    """
    names = list(dict.fromkeys(part for bar in parts.values() for part in bar))
    longest = max(sum(bar.values()) for bar in parts.values())
    ends = np.zeros(len(parts))
    for name, color in zip(names, colors(len(names)), strict=True):
        sizes = np.array([bar.get(name, 0.0) for bar in parts.values()])
        drawn = axes.barh(list(parts), sizes, left=ends, color=color, label=name, height=0.6)
        texts = ["" if size < 0.04 * longest else f"{size:,.0f}" if size >= 100 else f"{size:.3g}" for size in sizes]
        axes.bar_label(drawn, texts, label_type="center", color="white", fontsize="small")
        ends += sizes
    axes.invert_yaxis()
    axes.set(xlabel=unit)
    axes.legend(fontsize="small", ncols=len(names), loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False)
    clean(axes).grid(visible=False)
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
    return clean(axes)


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
