"""Where things lie in files, and what came out of them."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from kdtree_nb.plotting.style import QUIET, clean, colors


def file_map(axes: Axes, files: Mapping[str, Mapping[str, Sequence[tuple[int, int]]]]) -> Axes:
    """A bar a file, coloured by the kind of what lies there.

    Parameters
    ----------
    files : mapping from file to mapping from kind to (first byte, bytes) of each tensor
    """
    kinds = list(dict.fromkeys(kind for spans in files.values() for kind in spans))
    for line, spans in enumerate(files.values()):
        for kind, color in zip(kinds, colors(len(kinds)), strict=True):
            parts = [(begin / 1e3, size / 1e3) for begin, size in spans.get(kind, ())]
            axes.broken_barh(parts, (line - 0.35, 0.7), color=color, lw=0)
    axes.set_yticks(range(len(files)), list(files))
    axes.invert_yaxis()
    axes.set(xlabel="kilobyte of the file")
    handles = [Patch(color=color, label=kind) for kind, color in zip(kinds, colors(len(kinds)), strict=True)]
    axes.legend(
        handles=handles, fontsize="small", ncols=len(kinds), loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False
    )
    clean(axes).grid(visible=False)
    return axes


def against(axes: Axes, expected: np.ndarray, found: Mapping[str, np.ndarray], expected_by: str) -> Axes:
    """Values over those that were expected, one colour a label, the first on top; equal ones lie on the diagonal.

    Parameters
    ----------
    expected : float [n]
    found : mapping from label to float [n]
    expected_by : str
        What they are, for the axis.
    """
    ends = [expected.min(), expected.max()]
    axes.plot(ends, ends, color=QUIET, lw=1, zorder=0)
    for order, ((label, values), color) in enumerate(zip(found.items(), colors(len(found)), strict=True)):
        axes.plot(expected, values, ".", ms=3, color=color, label=label, zorder=len(found) - order)
    axes.set(xlabel=expected_by)
    axes.legend(fontsize="small", frameon=False, markerscale=3)
    return clean(axes)
