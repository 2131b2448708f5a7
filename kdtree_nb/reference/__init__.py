"""The specification, in NumPy: what every kernel computes, and the engine's path on NumPy arrays.

:mod:`~kdtree_nb.reference.model` stands apart. It reaches the same logits a second way (full attention
heads, dequantised weights, no cache), so the engine, which never calls it, can be checked against it.
"""
