"""What may be asked of an engine. Nothing here needs a loaded model: a wrong option is told before one is."""

import numpy as np
from ml_dtypes import bfloat16

from kdtree_nb.engine.decode import DECODERS
from kdtree_nb.kernels.choose_tokens import Sampling
from kdtree_nb.kernels.tree_build import MAX_BUDGET

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(bfloat16)}
MAX_NODE_BUDGET = MAX_BUDGET
LOWEST_TEMPERATURE = 1e-6
"""Above 0. The text is the greedy one long before, and logits / temperature stays far from overflow."""


def dtype_named(name: str) -> np.dtype:
    """What an engine multiplies.

    Raises
    ------
    ValueError
        For a name that is not one of :data:`DTYPES`.
    """
    if name not in DTYPES:
        raise ValueError(f"Engine.load: dtype={name!r}, expected one of {', '.join(DTYPES)}")
    return DTYPES[name]


def check_options(decoder: str, node_budget: int | str, max_new_tokens: int, sampling: Sampling) -> None:
    """What :meth:`Engine.generate` takes besides the prompt.

    Raises
    ------
    ValueError
        For the first that is wrong, named with its value.
    """
    temperature, seed, top_k, top_p = sampling
    require(decoder in DECODERS, f"decoder={decoder!r}", f"one of {', '.join(DECODERS)}")
    if node_budget != "auto":
        _require_whole("node_budget", node_budget, 0, MAX_NODE_BUDGET, ", or 'auto'")
    _require_whole("max_new_tokens", max_new_tokens, 1, np.inf)
    _require_whole("seed", seed, 0, 2**64 - 1)
    usable = isinstance(temperature, float | int | np.floating) and (
        temperature == 0 or LOWEST_TEMPERATURE <= temperature < np.inf
    )
    require(usable, f"temperature={temperature!r}", f"0, or a finite number from {LOWEST_TEMPERATURE}")
    _require_whole("top_k", top_k, 0, np.inf)
    share = isinstance(top_p, float | int | np.floating) and 0 < top_p <= 1
    require(share, f"top_p={top_p!r}", "a number above 0 and at most 1")


def require(holds: bool, what: str, expected: str) -> None:
    """Raise a ValueError that says what there is and what was expected, unless something holds."""
    if not holds:
        raise ValueError(f"generate: {what}, expected {expected}")


def _require_whole(name: str, value: object, lowest: int, highest: float, otherwise: str = "") -> None:
    whole = isinstance(value, int | np.integer) and bool(lowest <= value <= highest)
    upwards = "" if highest == np.inf else f" to {highest}"
    require(whole, f"{name}={value!r}", f"a whole number from {lowest}{upwards}{otherwise}")
