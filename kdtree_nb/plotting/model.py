"""A model's logits, text and cache."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from kdtree_nb.plotting.style import ACCENTS, QUIET, clean, colors


def logit_differences(axes: Axes, differences: Mapping[str, np.ndarray]) -> Axes:
    """Largest |logit difference| of each token, one line a prompt, on a logarithmic scale.

    Parameters
    ----------
    differences : mapping from label to float [tokens]
    """
    for (label, values), color in zip(differences.items(), colors(len(differences)), strict=True):
        axes.semilogy(np.arange(1, len(values) + 1), np.maximum(values, 1e-9), ".-", color=color, label=label, lw=1)
    axes.set(xlabel="new token", ylabel="max |Δ logit|")
    axes.legend(fontsize="small")
    return clean(axes)


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
    return clean(axes)


def layer_differences(axes: Axes, differences: Mapping[str, np.ndarray]) -> Axes:
    """Difference of each layer's output and, last, of the logits: one line a pair, on a logarithmic scale.

    Parameters
    ----------
    differences : mapping from label to float [layers + 1]
    """
    longest = max(map(len, differences.values()))
    for (label, values), color in zip(differences.items(), colors(len(differences)), strict=True):
        axes.semilogy(np.maximum(values, 1e-9), "o-", color=color, label=label, lw=1.2, ms=4)
    axes.set_xticks(range(longest), [*map(str, range(longest - 1)), "logits"])
    axes.set(xlabel="layer")
    axes.legend(fontsize="small", frameon=False)
    return clean(axes)


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
    return clean(axes)


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
    clean(axes).grid(axis="x", color="#e6e9ed", lw=0.8)
    return axes
