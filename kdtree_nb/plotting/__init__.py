"""Figures of this project: each function takes arrays, draws on the Axes it is given, and returns them."""

from kdtree_nb.plotting.basic import bars, curves, heatmap, labelled_points, shares
from kdtree_nb.plotting.drafting import (
    acceptance_by_depth,
    accepted_per_round,
    cost_curve,
    draft_tree,
    first_children,
    over_budgets,
    rounds,
    tokens_over_forwards,
    visibility,
)
from kdtree_nb.plotting.files import against, file_map
from kdtree_nb.plotting.model import (
    cache_per_token,
    differences_by_model,
    layer_differences,
    logit_differences,
    surprise,
)
from kdtree_nb.plotting.style import ACCENTS, INK, QUIET
from kdtree_nb.plotting.weights import error_of_peaks, floors, rounded_group, sectors

__all__ = [
    "ACCENTS",
    "INK",
    "QUIET",
    "acceptance_by_depth",
    "accepted_per_round",
    "against",
    "bars",
    "cache_per_token",
    "cost_curve",
    "curves",
    "differences_by_model",
    "draft_tree",
    "error_of_peaks",
    "file_map",
    "first_children",
    "floors",
    "heatmap",
    "labelled_points",
    "layer_differences",
    "logit_differences",
    "over_budgets",
    "rounded_group",
    "rounds",
    "sectors",
    "shares",
    "surprise",
    "tokens_over_forwards",
    "visibility",
]
