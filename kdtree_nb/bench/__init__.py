"""Measurements behind ``python -m kdtree_nb bench``."""

from kdtree_nb.bench.resources import ARCHS, DEFINES, KernelResources, resources

__all__ = ["ARCHS", "DEFINES", "KernelResources", "resources"]
