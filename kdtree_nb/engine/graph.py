"""A CUDA graph: what a function launches, recorded once and sent to the GPU with one call."""

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Graph(Generic[T]):
    """Record a function that launches kernels on CuPy's current stream, which may not be the default one.

    The function is not run by that. It has to have run before, so that weights are loaded and kernels compiled. It may
    read and write only arrays that stay where they are; nothing in it may copy from the host or wait for the GPU.

    Attributes
    ----------
    result
        What the function returned: arrays that every launch writes anew.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        import cupy

        self._function = function  # and with it all arrays that it reads
        self._memory = cupy.cuda.MemoryPool()  # its own: nobody else may be given what the graph writes to
        self._stream = cupy.cuda.get_current_stream()
        with cupy.cuda.using_allocator(self._memory.malloc):
            self._stream.begin_capture()
            try:
                self.result = function()
            finally:
                self._graph = self._stream.end_capture()

    def launch(self) -> T:
        """Run it on the stream that it was recorded on; does not wait."""
        self._graph.launch(self._stream)
        return self.result
