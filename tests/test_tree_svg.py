"""A tree's SVG is read back: well-formed, every node once, edges where parents are, the path told apart."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from kdtree_nb.reference.tree import DraftTree, tree_build
from kdtree_nb.reference.tree_svg import ACCEPTED, BONUS, DRAFTED, tree_layout, tree_svg

SVG = "{http://www.w3.org/2000/svg}"
LABELS, PARENTS = ["root", "a", "b", "c", "d"], np.array([-1, 0, 0, 1, 2], np.int32)


def drawn(svg: str) -> tuple[dict[str, str], list[str]]:
    """The fill of each label, and the borders of the edges in the order in which they are drawn."""
    root = ElementTree.fromstring(svg)
    texts = [text.text for text in root.findall(f"{SVG}text")]
    fills = [rect.attrib["fill"] for rect in root.findall(f"{SVG}rect")]
    return dict(zip(texts, fills, strict=True)), [path.attrib["stroke"] for path in root.findall(f"{SVG}path")]


def test_nodes_path_and_bonus() -> None:
    fills, edges = drawn(tree_svg(LABELS, PARENTS, np.array([0, 2, 4]), "e"))
    kinds = {"0 root": ACCEPTED, "1 a": DRAFTED, "2 b": ACCEPTED, "3 c": DRAFTED, "4 d": ACCEPTED, "e": BONUS}
    assert fills == {label: kind[0] for label, kind in kinds.items()}
    assert edges[:2] == [DRAFTED[1]] * 2  # under the others
    assert sorted(edges[2:]) == sorted([ACCEPTED[1], ACCEPTED[1], BONUS[1]])


def test_without_a_path_nothing_is_told_apart() -> None:
    fills, edges = drawn(tree_svg(LABELS, PARENTS))
    assert set(fills.values()) == {DRAFTED[0]} and set(edges) == {DRAFTED[1]}


def test_layout() -> None:
    places = tree_layout(PARENTS)
    assert places == {0: (0, 0), 1: (1, 0), 3: (2, 0), 2: (1, 1), 4: (2, 1)}
    parents = np.array([-1, *(np.random.default_rng(0).integers(0, np.arange(1, 300)))])
    assert len(set(tree_layout(parents).values())) == 300  # no node on another
    assert tree_layout(np.arange(-1, 3000))[3000] == (3000, 0)  # no recursion that a deep chain exhausts


def test_an_edge_joins_the_boxes_of_parent_and_child() -> None:
    root = ElementTree.fromstring(tree_svg(LABELS, PARENTS))
    boxes = [{key: float(rect.attrib[key]) for key in ("x", "y", "width")} for rect in root.findall(f"{SVG}rect")]
    ends = {(round(box["x"] + box["width"], 1), box["y"] + 10) for box in boxes}
    starts = {(box["x"], box["y"] + 10) for box in boxes}
    for path in root.findall(f"{SVG}path"):
        x, above, half, y, rest = map(float, re.findall(r"[\d.]+", path.attrib["d"]))
        assert (x, above) in ends
        assert (round(x + half + rest, 1), y) in starts


@pytest.mark.parametrize("label", ["<b>&", "\n\t", "\x00\x1b", "↵␣", '"', "", "𝔘\u200b"])
def test_any_label_is_well_formed(label: str) -> None:
    fills, _ = drawn(tree_svg(["r", label], np.array([-1, 0])))
    shown = "".join(c if c.isprintable() else "·" for c in label)
    assert list(fills) == ["0 r", f"1 {shown}"]


def test_a_tree_draws_itself() -> None:
    log_probs = np.log(np.array([[0.7, 0.3], [0.6, 0.4]], np.float32))
    tree = tree_build(17, log_probs, np.array([[5, 6], [7, 8]], np.int32), 9)
    assert tree.num_nodes == 7
    fills, edges = drawn(tree._repr_svg_() or "")
    assert sorted(fills) == sorted(f"{node} {token}" for node, token in enumerate(tree.tokens[:7]))  # no padding
    assert len(edges) == 6


def test_a_root_alone() -> None:
    assert drawn(tree_svg(["r"], np.array([-1]), [0], "b")) == ({"0 r": ACCEPTED[0], "b": BONUS[0]}, [BONUS[1]])


def test_arrays_on_a_gpu_are_shown_as_text() -> None:
    class Elsewhere:
        __cuda_array_interface__ = None

    assert DraftTree(*[Elsewhere()] * 6)._repr_svg_() is None
