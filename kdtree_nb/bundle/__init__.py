"""KDTR bundles: a model's config and weights in one safetensors file, or in shards with an index beside them.

A bundle comes from somewhere else, so nothing in it is believed before it is checked. Opening reads headers
only and holds them against the shapes that the config asks for; a tensor's bytes are read when it is used.
"""

from kdtree_nb.bundle.bundle import Bundle, Row
from kdtree_nb.bundle.format import BundleError, Entry
from kdtree_nb.bundle.write import write_bundle

__all__ = ["Bundle", "BundleError", "Entry", "Row", "write_bundle"]
