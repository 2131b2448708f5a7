"""GPUs by the shared memory that a block has there, and the emulator."""

from kdtree_nb.kernels.gpu import Processor
from kdtree_nb.kernels.launch import MAX_SHARED_BYTES

PROCESSORS = {
    "A100": Processor("80", 163 * 1024),
    "H200": Processor("90", 227 * 1024),
    "RTX 5090": Processor("120", 99 * 1024),
    "none": Processor("", MAX_SHARED_BYTES),
}
