"""CUDA kernels, one ``.cu`` and one ``.py`` each; until they land, the engine runs their NumPy specification."""
