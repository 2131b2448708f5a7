"""The shapes of a model and of its drafter: read from, and written to, a Hugging Face ``config.json``."""

from collections.abc import Mapping
from typing import Any

from kdtree_nb.config.drafter import DrafterConfig
from kdtree_nb.config.model import ModelConfig, YarnScaling

__all__ = ["Config", "DrafterConfig", "ModelConfig", "YarnScaling", "config_from_hf"]

Config = ModelConfig | DrafterConfig
"""Of what a bundle can hold."""


def config_from_hf(hf: Mapping[str, Any]) -> Config:
    """A model's or a drafter's config: a drafter's has a ``dflash_config``.

    Raises
    ------
    ValueError
        As ``from_hf`` of the two classes.
    """
    return DrafterConfig.from_hf(hf) if "dflash_config" in hf else ModelConfig.from_hf(hf)
