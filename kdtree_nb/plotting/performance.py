"""What kernels and rounds take: beside what the machine allows, by their parts, and version by version."""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from kdtree_nb.plotting.basic import shares
from kdtree_nb.plotting.style import ACCENTS, INK, QUIET, clean, colors, plain_numbers


def roofline(
    axes: Axes, gb_per_s: float, tflop_per_s: float, kernels: Mapping[str, Sequence[tuple[np.ndarray, ...]]]
) -> Axes:
    """Operations a second over operations a byte, below what memory and multipliers allow; a line a shape.

    Parameters
    ----------
    gb_per_s, tflop_per_s : float
        What the machine reads and multiplies at most.
    kernels : mapping from kernel to shapes, each (operations, bytes, microseconds), float [n] all three
    """
    lines = [
        (label, operations / moved, operations / times / 1e6, color)
        for (label, shapes), color in zip(kernels.items(), colors(len(kernels)), strict=True)
        for operations, moved, times in shapes
    ]
    intensities = np.concatenate([intensity for _, intensity, *_ in lines])
    roof = np.geomspace(intensities.min() / 1.5, max(intensities.max(), 1e3 * tflop_per_s / gb_per_s) * 1.5, 200)
    axes.loglog(roof, np.minimum(roof * gb_per_s / 1e3, tflop_per_s), color=INK, lw=1.8, label="roof")
    axes.axvline(1e3 * tflop_per_s / gb_per_s, color=QUIET, lw=1, ls=":")
    for label, intensity, rate, color in lines:
        again = label in axes.get_legend_handles_labels()[1]
        axes.loglog(intensity, rate, "o-", color=color, lw=1, ms=4, label=f"_{label}" if again else label)
    axes.set(xlabel="operations a byte", ylabel="TFLOP/s")
    axes.legend(fontsize="small", frameon=False)
    return clean(axes)


def round_timeline(axes: Axes, parts: Mapping[str, Mapping[str, float]], whole: Sequence[float]) -> Axes:
    """Parts of a round end to end, a bar a round, with a mark where the round itself ends.

    Parameters
    ----------
    parts : mapping from round to mapping from part to microseconds
    whole : float [rounds]
        Microseconds of the round: more than the parts where nothing ran, less where they overlapped.
    """
    shares(axes, parts, "µs")
    axes.plot(whole, range(len(whole)), "|", color=INK, ms=26, mew=2, label="the whole round")
    columns = len(axes.containers) + 1
    axes.legend(
        fontsize="small",
        ncols=columns,
        markerscale=0.4,
        frameon=False,
        loc="lower center",
        bbox_to_anchor=(0.5, 1),
    )
    return axes


def waterfall(axes: Axes, labels: Sequence[str], values: Sequence[float]) -> Axes:
    """A value after each step, on a logarithmic scale: a step's bar reaches from the value before to its own.

    Parameters
    ----------
    labels : [steps]
        The first is of the start.
    values : float [steps]
        Smaller is better; above each bar stands the factor gained, below 1 if it was lost.
    """
    base = min(values) / 2
    tops = [f"{values[0]:.3g}"] + [f"×{before / after:.2f}" for before, after in itertools.pairwise(values)]
    for step, (before, after, text) in enumerate(zip([base, *values], values, tops, strict=False)):
        color = QUIET if step == 0 else ACCENTS[2] if after <= before else ACCENTS[1]
        axes.bar(step, before - after, bottom=after, color=color, edgecolor=color, width=0.7)
        axes.hlines(after, step + 0.35, step + 0.65, color=INK, lw=0.8)
        at = step, max(before, after)
        axes.annotate(text, at, xytext=(0, 3), textcoords="offset points", ha="center", size=9)
    axes.set(yscale="log", ylim=(base, 1.6 * max(values)), xlim=(-0.6, len(values) - 0.6))
    axes.set_xticks(range(len(labels)), labels)
    plain_numbers(axes.yaxis)
    return clean(axes)
