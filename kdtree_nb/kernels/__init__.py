"""CUDA kernels, one ``.cu`` and one ``.py`` each: on CuPy arrays, on NumPy arrays, or emulated (:mod:`.launch`)."""
