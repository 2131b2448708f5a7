"""Figures of this project: each function takes arrays, draws on the Axes it is given, and returns them."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

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


def _colors(count: int) -> list[str]:
    return [ACCENTS[i % len(ACCENTS)] for i in range(count)]


def _clean(axes: Axes) -> Axes:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e9ed", lw=0.8)
    axes.set_axisbelow(True)
    return axes
