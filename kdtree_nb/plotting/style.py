"""What all figures share."""

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import LogLocator

INK, QUIET = "#1f3a5f", "#9aa5b1"
ACCENTS = ("#1f77b4", "#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#e6ab02")


def colors(count: int) -> list[str]:
    """As many colours as there are series, again from the first where these are many."""
    return [ACCENTS[i % len(ACCENTS)] for i in range(count)]


def clean(axes: Axes) -> Axes:
    """Leave out what says nothing."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e9ed", lw=0.8)
    axes.set_axisbelow(True)
    return axes


def plain_numbers(axis: Axis) -> None:
    """Ticks of a logarithmic axis at 1, 2, 5, 10, …, written out."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(lambda value, _: f"{value:,g}")
    axis.set_ticks([], minor=True)
