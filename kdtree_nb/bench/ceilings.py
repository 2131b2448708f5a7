"""What this GPU can do at most: bytes read a second, and bfloat16 multiplications."""

from importlib.util import find_spec
from typing import NamedTuple

from kdtree_nb.bench.timing import microseconds, require_gpu, torch_microseconds

READ_BYTES = 4 << 30
MATRIX_SIDE = 8192


class Ceilings(NamedTuple):
    """Measured: gigabytes a second that a sum over 4 GiB reads; TFLOP/s of torch's bf16 product, None without torch."""

    read_gb_per_s: float
    bf16_tflop_per_s: float | None


def ceilings() -> Ceilings:
    """Measure both.

    Raises
    ------
    ValueError
        Without a GPU.
    """
    require_gpu()
    return Ceilings(_read(), _matrix() if find_spec("torch") else None)


def _read() -> float:
    import cupy

    values = cupy.random.default_rng(0).random(READ_BYTES // 4, dtype=cupy.float32)
    total = cupy.empty((), cupy.float32)
    return values.nbytes / microseconds([lambda: cupy.sum(values, out=total)]) / 1e3


def _matrix() -> float:
    import torch

    a, b = (torch.randn(MATRIX_SIDE, MATRIX_SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)
    return 2 * MATRIX_SIDE**3 / torch_microseconds([lambda: torch.mm(a, b, out=c)]) / 1e6
