"""Draft trees as SVG: text, so that a notebook or a page shows them without any library."""

from collections.abc import Sequence
from html import escape

import numpy as np

LINE, GAP, CHARACTER = 26, 30, 7.3
"""Pixels from line to line, between columns, and of a character."""
DRAFTED, ACCEPTED, BONUS = (  # fill, border, text
    ("#ffffff", "#9aa5b1", "#5b6672"),
    ("#e3f4ee", "#1b9e77", "#1f3a5f"),
    ("#d95f02", "#d95f02", "#ffffff"),
)


def tree_svg(labels: Sequence[str], parents: np.ndarray, path: Sequence[int] = (), bonus: str | None = None) -> str:
    """A draft tree from left to right, a column each depth; a node shows its index and its label.

    Parameters
    ----------
    labels : [N]
    parents : int [N]
        −1 for the root and for padding, which is not drawn.
    path : node indices
        Accepted nodes, told apart by their colour.
    bonus : str, optional
        The target's token after the path, drawn as one more child of its last node.
    """
    texts = [f"{node} {label}" for node, label in enumerate(labels)]
    if bonus is not None:
        texts, parents = [*texts, bonus], np.append(parents, path[-1])
    places, accepted = tree_layout(parents), {int(node) for node in path}
    widths = [0.0] * (1 + max(depth for depth, _ in places.values()))
    for node, (depth, _) in places.items():
        widths[depth] = max(widths[depth], (len(texts[node]) + 2) * CHARACTER)
    lefts = [1 + sum(widths[:depth]) + GAP * depth for depth in range(len(widths))]

    edges, boxes = [], []
    for node, (depth, line) in places.items():
        fill, border, ink = BONUS if node == len(labels) else ACCEPTED if node in accepted else DRAFTED
        x, y, drafted = lefts[depth], LINE * line + 14, fill == DRAFTED[0]
        if node:
            above = LINE * places[int(parents[node])][1] + 14
            edge = f'<path d="M{x - GAP:.1f} {above}h{GAP / 2}V{y}h{GAP / 2}" fill="none" stroke="{border}"'
            edges.append((not drafted, f'{edge} stroke-width="{1 if drafted else 2}"/>'))
        boxes.append(f'<rect x="{x:.1f}" y="{y - 10}" width="{widths[depth]:.1f}" height="20" rx="5"')
        boxes.append(f' fill="{fill}" stroke="{border}"/><text x="{x + CHARACTER:.1f}" y="{y + 4}" fill="{ink}">')
        boxes.append(escape("".join(c if c.isprintable() else "·" for c in texts[node])) + "</text>")
    lines = "".join(text for _, text in sorted(edges))  # the accepted path over the others
    size = (
        f'width="{lefts[-1] + widths[-1] + 1:.1f}" height="{LINE * (1 + max(line for _, line in places.values())) + 2}"'
    )
    style = 'font-family="monospace" font-size="12" xml:space="preserve"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{lines}{"".join(boxes)}</svg>'


def tree_layout(parents: np.ndarray) -> dict[int, tuple[int, int]]:
    """Depth and line of each node below the root: a first child continues its parent's line, a leaf ends it."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(np.asarray(parents).tolist()):
        children.setdefault(parent, []).append(node)
    places, stack, line = {}, [(0, 0)], 0
    while stack:
        node, depth = stack.pop()
        places[node] = depth, line
        below = children.get(node, [])
        line += not below
        stack += [(child, depth + 1) for child in reversed(below)]
    return places
