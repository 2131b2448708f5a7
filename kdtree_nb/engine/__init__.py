"""From a bundle to tokens: weights, latent cache, model, drafters, and the decoding loop."""

from kdtree_nb.engine.decode import Generation, Round
from kdtree_nb.engine.drafter import Drafter, Oracle, PromptLookup
from kdtree_nb.engine.engine import Engine

__all__ = ["Drafter", "Engine", "Generation", "Oracle", "PromptLookup", "Round"]
