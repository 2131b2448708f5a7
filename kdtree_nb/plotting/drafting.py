"""Draft trees: one of them, what rounds accept, and what budgets bring."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from kdtree_nb.plotting.style import ACCENTS, INK, QUIET, clean, colors
from kdtree_nb.reference import tree_svg


def accepted_per_round(axes: Axes, accepted: Mapping[str, Sequence[int]]) -> Axes:
    """Tokens committed by each target forward, one step line a run; plain decoding is the line at 1.

    Parameters
    ----------
    accepted : mapping from label to the drafts accepted in each round
    """
    for (label, values), color in zip(accepted.items(), colors(len(accepted)), strict=True):
        committed = np.asarray(values) + 1
        axes.step(np.arange(1, len(committed) + 1), committed, where="mid", color=color, label=label, lw=1.3)
    axes.axhline(1, color=QUIET, lw=1, ls="--")
    axes.set(xlabel="round (target forward)", ylabel="tokens committed", ylim=(0, None))
    axes.legend(fontsize="small")
    return clean(axes)


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


def tokens_over_forwards(axes: Axes, accepted: Mapping[str, Sequence[int]]) -> Axes:
    """Tokens written by then over the target's forward passes, one line a run; its slope is τ.

    Parameters
    ----------
    accepted : mapping from label to the drafts accepted in each round
    """
    for (label, values), color in zip(accepted.items(), colors(len(accepted)), strict=True):
        written = np.cumsum([0, *(np.asarray(values) + 1)])
        axes.plot(written, color=color, label=label, lw=1.4)
    axes.set(xlabel="target forwards", ylabel="tokens written", xlim=(0, None), ylim=(0, None))
    axes.legend(fontsize="small", frameon=False)
    return clean(axes)


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


def acceptance_by_depth(axes: Axes, shares: Mapping[str, Sequence[float]]) -> Axes:
    """How many of the rounds that drafted to a depth have an accepted path that reaches it, one line a label.

    Parameters
    ----------
    shares : mapping from label to float [depths]
        From depth 1: ``acceptance_by_depth`` of :func:`kdtree_nb.acceptance.statistics`.
    """
    for (label, values), color in zip(shares.items(), colors(len(shares)), strict=True):
        axes.plot(np.arange(1, len(values) + 1), values, "o-", color=color, label=label, lw=1.4, ms=4)
    axes.set(xlabel="depth", ylabel="rounds accepted to here", ylim=(0, 1.03))
    axes.set_xticks(range(1, max(map(len, shares.values())) + 1))
    axes.legend(fontsize="small", frameon=False)
    return clean(axes)


def over_budgets(axes: Axes, values: Mapping[str, Mapping[int, float]]) -> Axes:
    """A quantity over the node budget, doubling to the right, one line a label.

    Parameters
    ----------
    values : mapping from label to mapping from budget to value
        Where there is one budget alone, no other would change it: a level line.
    """
    budgets = sorted({budget for of_label in values.values() for budget in of_label if len(of_label) > 1})
    for (label, of_label), color in zip(values.items(), colors(len(values)), strict=True):
        if len(of_label) > 1:
            axes.plot(list(of_label), list(of_label.values()), "o-", color=color, label=label, lw=1.4, ms=4)
        else:
            axes.axhline(*of_label.values(), color=color, label=label, lw=1.4, ls="--")
    axes.set_xscale("log", base=2)
    axes.set_xticks(budgets, map(str, budgets))
    axes.set_xticks([], minor=True)
    axes.set(xlabel="node budget", ylim=(0, None))
    axes.legend(fontsize="small", frameon=False)
    return clean(axes)


def cost_curve(axes: Axes, costs: np.ndarray, rates: np.ndarray) -> Axes:
    """What a round costs by its nodes, and what it brings: a tree ends where expected tokens per second are highest.

    Parameters
    ----------
    costs : float [nodes + 1]
        Seconds of a round with 0, 1, … nodes.
    rates : float [nodes + 1]
        Tokens per second to expect of it: :func:`kdtree_nb.reference.tree.expected_rate`.
    """
    best = int(rates.argmax())
    axes.plot(1e3 * costs, color=INK, lw=1.4, label="cost of a round")
    axes.set(xlabel="nodes of the tree", ylabel="ms", ylim=(0, None), xlim=(0, len(costs) - 1))
    right = axes.twinx()
    right.plot(rates, color=ACCENTS[1], lw=1.4, label="expected tokens/s")
    right.plot(best, rates[best], "o", color=ACCENTS[1], ms=7)
    right.annotate(
        f"{best} nodes", (best, rates[best]), xytext=(6, 6), textcoords="offset points", color=ACCENTS[1], size="small"
    )
    right.set(ylabel="expected tokens/s", ylim=(0, 1.15 * rates[best]))
    right.spines["top"].set_visible(False)
    handles = [*axes.get_lines(), right.get_lines()[0]]
    axes.legend(handles=handles, fontsize="small", ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False)
    clean(axes).spines["right"].set_visible(True)
    return axes


def first_children(axes: Axes, right: Mapping[str, Sequence[float]], drafted: Mapping[str, Sequence[float]]) -> Axes:
    """How often the best child of an accepted node is right, as bars, and how often it was drafted to be, as marks.

    Parameters
    ----------
    right, drafted : mapping from drafter to float [2]
        For a parent on the spine, and for one beside it: ``children`` of :func:`kdtree_nb.acceptance.statistics`.
    """
    width = 0.8 / len(right)
    for i, ((label, shares), color) in enumerate(zip(right.items(), colors(len(right)), strict=True)):
        at = np.arange(2) + (i - (len(right) - 1) / 2) * width
        bars = axes.bar(at, shares, 0.9 * width, color=color, label=label)
        axes.bar_label(bars, [f"{share:.0%}" for share in shares], label_type="center", color="white", fontsize="small")
        axes.hlines(drafted[label], at - 0.45 * width, at + 0.45 * width, color=INK, lw=2.5)
    axes.hlines([], 0, 0, color=INK, lw=2.5, label="as drafted")
    axes.set_xticks(range(2), ["parent on the spine", "parent a sibling"])
    axes.set(ylabel="first child is right", ylim=(0, 1))
    axes.legend(fontsize="small", frameon=False)
    return clean(axes)
