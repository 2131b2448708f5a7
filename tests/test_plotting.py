"""Figures show the numbers they are given: the drawn data is read back from the Axes."""

import inspect

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kdtree_nb import plotting


@pytest.fixture
def axes() -> Axes:
    return Figure().subplots()


def line(axes: Axes, label: str) -> tuple[list[float], list[float]]:
    (found,) = [line for line in axes.get_lines() if line.get_label() == label]
    return np.asarray(found.get_xdata()).tolist(), np.asarray(found.get_ydata()).tolist()


def legend(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_logit_differences(axes: Axes) -> None:
    drawn = plotting.logit_differences(axes, {"code": np.array([1e-6, 3e-5, 2e-6]), "prose": np.array([0.0, 1e-4])})
    assert drawn is axes
    assert line(axes, "code") == ([1, 2, 3], [1e-6, 3e-5, 2e-6])
    assert line(axes, "prose") == ([1, 2], [1e-9, 1e-4])  # a logarithmic axis has no 0
    assert axes.get_yscale() == "log"
    assert legend(axes) == ["code", "prose"]


def test_accepted_per_round(axes: Axes) -> None:
    assert plotting.accepted_per_round(axes, {"code": [0, 3, 7], "prose": [1]}) is axes
    assert line(axes, "code") == ([1, 2, 3], [1, 4, 8])  # committed: the accepted drafts and the bonus token
    assert line(axes, "prose") == ([1], [2])
    assert [1, 1] in [list(line.get_ydata()) for line in axes.get_lines()]  # plain decoding
    assert axes.get_ylim()[0] == 0


def test_more_lines_than_colours(axes: Axes) -> None:
    plotting.accepted_per_round(axes, {str(i): [i] for i in range(2 * len(plotting.ACCENTS) + 1)})
    assert len(legend(axes)) == 2 * len(plotting.ACCENTS) + 1


def test_curves(axes: Axes) -> None:
    values = {"a": np.array([5.0, 1.0]), "b": np.array([2.0, 2.5])}
    assert plotting.curves(axes, np.array([1.0, 2.0]), values, "o-") is axes
    assert line(axes, "a") == ([1, 2], [5, 1])
    assert line(axes, "b") == ([1, 2], [2, 2.5])
    assert legend(axes) == ["a", "b"]


def test_bars(axes: Axes) -> None:
    values = {"chain": np.array([2.0, 3.0, 4.0]), "tree": np.array([2.5, 4.0, 5.5])}
    assert plotting.bars(axes, ["x", "y", "z"], values) is axes
    for container, heights in zip(axes.containers, values.values(), strict=True):
        assert [bar.get_height() for bar in container] == heights.tolist()
    centres = [[bar.get_x() + bar.get_width() / 2 for bar in container] for container in axes.containers]
    np.testing.assert_allclose(np.mean(centres, axis=0), [0, 1, 2], atol=1e-12)
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["x", "y", "z"]
    assert legend(axes) == ["chain", "tree"]


def test_shares(axes: Axes) -> None:
    parts = {"fp32": {"experts": 80.0, "rest": 20.0}, "int4": {"experts": 11.0, "rest": 20.0, "scales": 2.0}}
    assert plotting.shares(axes, parts, "MB") is axes
    for container, name in zip(axes.containers, ("experts", "rest", "scales"), strict=True):
        assert [bar.get_width() for bar in container] == [bar.get(name, 0) for bar in parts.values()]
    ends = [bar.get_x() + bar.get_width() for bar in axes.containers[-1]]
    assert ends == [100, 33]
    assert axes.get_xlabel() == "MB"
    texts = [text.get_text() for text in axes.texts]
    assert texts == ["80", "11", "20", "20", "", ""]  # 2 of 100 is too narrow for a number


def test_labelled_points(axes: Axes) -> None:
    assert plotting.labelled_points(axes, np.array([1.0, 2.0]), np.array([4.0, 3.0]), ["a", "b"]) is axes
    (points,) = axes.get_lines()
    assert (list(points.get_xdata()), list(points.get_ydata())) == ([1, 2], [4, 3])
    assert [(text.get_text(), text.xy) for text in axes.texts] == [("a", (1, 4)), ("b", (2, 3))]


def test_heatmap(axes: Axes) -> None:
    values = np.array([[1.0, 5.0], [2.0, 1.0]])
    assert plotting.heatmap(axes, values, "share") is axes
    (image,) = axes.get_images()
    np.testing.assert_array_equal(image.get_array(), values)
    assert image.get_clim() == (0, 5)
    assert image.colorbar.ax.get_ylabel() == "share"


def test_rounded_group(axes: Axes) -> None:
    weights, codes = np.array([0.1, -0.32, 0.5]), np.array([1, -3, 5])
    assert plotting.rounded_group(axes, weights, codes, 0.1) is axes
    assert line(axes, "weight") == ([0, 1, 2], weights.tolist())
    np.testing.assert_allclose(line(axes, "code · scale")[1], [0.1, -0.3, 0.5])
    (errors,) = [collection for collection in axes.collections if collection.get_label() == "error"]
    np.testing.assert_allclose(
        [segment[:, 1] for segment in errors.get_segments()], [[0.1, 0.1], [-0.32, -0.3], [0.5, 0.5]]
    )


def test_error_of_peaks(axes: Axes) -> None:
    peaks, errors, predicted = np.array([2.0, 1.0, 3.0]), np.array([0.2, 0.1, 0.3]), np.array([0.21, 0.11, 0.31])
    assert plotting.error_of_peaks(axes, peaks, errors, predicted) is axes
    (prediction,) = axes.get_lines()
    assert (list(prediction.get_xdata()), list(prediction.get_ydata())) == ([1, 2, 3], [0.11, 0.21, 0.31])
    assert axes.collections[0].get_array().sum() == 3  # every group is in a cell


def test_cache_per_token(axes: Axes) -> None:
    assert plotting.cache_per_token(axes, {"K2": 1000.0, "V3": 400.0}, {"K2": 100.0, "V3": 50.0}) is axes
    assert line(axes, "full heads") == ([1000, 400], [0, 1])
    assert line(axes, "latent + rotated key") == ([100, 50], [0, 1])
    assert [text.get_text() for text in axes.texts] == ["10.0×", "8.0×"]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["K2", "V3"]


def test_differences_by_model(axes: Axes) -> None:
    differences = {"a": np.array([1e-5, 2e-5]), "b": np.array([3e-6])}
    assert plotting.differences_by_model(axes, differences, 1e-4) is axes
    drawn = [np.asarray(line.get_ydata()).tolist() for line in axes.get_lines()]
    assert drawn == [[1e-5, 2e-5], [3e-6], [1e-4, 1e-4]]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["a", "b"]


def test_draft_tree(axes: Axes) -> None:
    labels, parents = ["root", "a", "b", "c", "d"], np.array([-1, 0, 0, 1, 2])
    assert plotting.draft_tree(axes, labels, parents, [0, 2, 4], "bonus") is axes
    places = {text.get_text(): text.get_position() for text in axes.texts}
    assert places.keys() == {*labels, "bonus"}
    assert [places[label][0] for label in (*labels, "bonus")] == [0, 1, 1, 2, 2, 3]  # depth
    assert len({places[label] for label in labels}) == 5  # no node on another
    edges = {tuple(map(tuple, line.get_xydata()[[0, -1]])): line.get_color() for line in axes.get_lines()}
    assert len(edges) == 5
    colors = {
        label: edges[places[labels[parent]], places[label]] for label, parent in zip("abcd", parents[1:], strict=True)
    }
    assert colors["a"] == colors["c"] != colors["b"] == colors["d"]  # the path is told apart
    assert (places["d"], places["bonus"]) in edges


def test_tokens_over_forwards(axes: Axes) -> None:
    assert plotting.tokens_over_forwards(axes, {"tree": [2, 0, 3], "plain": [0, 0]}) is axes
    assert line(axes, "tree") == ([0, 1, 2, 3], [0, 3, 4, 8])
    assert line(axes, "plain") == ([0, 1, 2], [0, 1, 2])


def test_every_figure_takes_the_axes_first_and_says_what_it_shows() -> None:
    for name, function in inspect.getmembers(plotting, inspect.isfunction):
        if not name.startswith("_"):
            first, *_ = inspect.signature(function).parameters.values()
            assert (first.name, first.annotation) == ("axes", Axes), name
            assert inspect.signature(function).return_annotation is Axes, name
            assert function.__doc__, name


def test_visibility(axes: Axes) -> None:
    visible = np.array([[True, False], [True, True]])
    assert plotting.visibility(axes, visible, ["root", "a"]) is axes
    (image,) = axes.get_images()
    np.testing.assert_array_equal(image.get_array(), visible)
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["root", "a"]


def test_acceptance_by_depth(axes: Axes) -> None:
    assert plotting.acceptance_by_depth(axes, {"docs": [0.9, 0.5], "kjv": [1.0, 0.7, 0.2]}) is axes
    assert line(axes, "docs") == ([1, 2], [0.9, 0.5])
    assert line(axes, "kjv") == ([1, 2, 3], [1.0, 0.7, 0.2])
    assert axes.get_xticks().tolist() == [1, 2, 3]
    assert axes.get_ylim()[0] == 0


def test_over_budgets(axes: Axes) -> None:
    values = {"chain": {8: 3.5}, "tree": {4: 3.0, 16: 4.5, 64: 5.0}}
    assert plotting.over_budgets(axes, values) is axes
    assert line(axes, "tree") == ([4, 16, 64], [3.0, 4.5, 5.0])
    assert line(axes, "chain") == ([0, 1], [3.5, 3.5])  # from edge to edge
    assert axes.get_xscale() == "log"
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["4", "16", "64"]
    assert legend(axes) == ["chain", "tree"]


def test_cost_curve_marks_the_best_rate(axes: Axes) -> None:
    costs, rates = np.array([0.010, 0.011, 0.013, 0.020]), np.array([100.0, 150.0, 170.0, 120.0])
    assert plotting.cost_curve(axes, costs, rates) is axes
    np.testing.assert_allclose(line(axes, "cost of a round"), ([0, 1, 2, 3], [10, 11, 13, 20]))
    (right,) = [other for other in axes.figure.axes if other is not axes]
    assert line(right, "expected tokens/s") == ([0, 1, 2, 3], rates.tolist())
    (mark,) = [drawn for drawn in right.get_lines() if drawn.get_marker() == "o"]
    assert (list(mark.get_xdata()), list(mark.get_ydata())) == ([2], [170])
    assert [text.get_text() for text in right.texts] == ["2 nodes"]
    assert legend(axes) == ["cost of a round", "expected tokens/s"]


def test_first_children(axes: Axes) -> None:
    right = {"marginal": [0.88, 0.36], "tree": [0.87, 0.65]}
    drafted = {"marginal": [0.87, 0.54], "tree": [0.86, 0.66]}
    assert plotting.first_children(axes, right, drafted) is axes
    for container, label in zip(axes.containers, right, strict=True):
        assert [bar.get_height() for bar in container] == right[label]
    marks = [segment for marks in axes.collections for segment in marks.get_segments() if len(segment)]
    assert [segment[0, 1] for segment in marks] == [*drafted["marginal"], *drafted["tree"]]
    bars = [bar for container in axes.containers for bar in container]
    for bar, segment in zip(bars, marks, strict=True):
        assert bar.get_x() <= segment[:, 0].min() < segment[:, 0].max() <= bar.get_x() + bar.get_width() + 1e-12
    assert [text.get_text() for text in axes.texts] == ["88%", "36%", "87%", "65%"]
    assert set(legend(axes)) == {"marginal", "tree", "as drafted"}


def test_file_map(axes: Axes) -> None:
    files = {"a": {"words": [(0, 500), (1000, 250)], "scales": [(500, 500)]}, "b": {"scales": [(0, 2000)]}}
    assert plotting.file_map(axes, files) is axes
    drawn = {}
    for collection in axes.collections:
        for path in collection.get_paths():
            (left, top), (right, bottom) = path.vertices.min(axis=0), path.vertices.max(axis=0)
            color = tuple(collection.get_facecolor()[0])
            drawn.setdefault(round((top + bottom) / 2), []).append(
                (color, round(1e3 * left), round(1e3 * (right - left)))
            )
    words, scales = (handle.get_facecolor() for handle in axes.get_legend().legend_handles)
    assert legend(axes) == ["words", "scales"]
    assert sorted(drawn[0]) == sorted([(words, 0, 500), (words, 1000, 250), (scales, 500, 500)])
    assert drawn[1] == [(scales, 0, 2000)]


def test_against(axes: Axes) -> None:
    expected, found = np.array([1.0, -2.0]), {"a": np.array([1.5, -2.0]), "b": np.array([0.0, 3.0])}
    assert plotting.against(axes, expected, found, "theirs") is axes
    assert line(axes, "a") == ([1, -2], [1.5, -2])
    assert line(axes, "b") == ([1, -2], [0, 3])
    assert [-2, 1] in [list(line.get_ydata()) for line in axes.get_lines() if list(line.get_xdata()) == [-2, 1]]
    assert legend(axes) == ["a", "b"]
    tops = {drawn.get_label(): drawn.get_zorder() for drawn in axes.get_lines()}
    assert tops["a"] > tops["b"]
