"""From a bundle to tokens: weights, latent cache, model, drafters, and the decoding loop."""

from kdtree_nb.engine.decode import Generation, Round
from kdtree_nb.engine.dflash import DFlash
from kdtree_nb.engine.drafter import Drafter, Oracle, PromptLookup, Proposal
from kdtree_nb.engine.engine import Engine

__all__ = ["DFlash", "Drafter", "Engine", "Generation", "Oracle", "PromptLookup", "Proposal", "Round"]
