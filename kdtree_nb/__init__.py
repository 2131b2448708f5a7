"""kdtree_nb: INT4 W4A16 inference with draft-tree speculative decoding, as notebooks and a package."""

__version__ = "0.1.0"
