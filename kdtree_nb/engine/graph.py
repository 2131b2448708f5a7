"""A CUDA graph: what a function launches, recorded once and sent to the GPU with one call."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import WeakSet

from kdtree_nb.kernels.gpu import recording

T = TypeVar("T")
_recorded: "WeakSet[Graph[Any]]" = WeakSet()


def bytes_of_graphs() -> int:
    """Device memory of all graphs there are."""
    return sum(graph.nbytes for graph in _recorded)


class Graph(Generic[T]):
    """Record a function that launches kernels on CuPy's current stream, which may not be the default one.

    The function is not run by that. It has to have run before, so that weights are loaded and kernels compiled. It may
    read and write only arrays that stay where they are; nothing in it may copy from the host or wait for the GPU. No
    weight of a product or a norm may be among what it writes: kernels read those before their turn.

    Its arguments, and the arrays in them, live as long as the graph. The function does not: it is a method of what
    keeps the graph, and the two would keep each other alive.

    Attributes
    ----------
    result
        What the function returned: arrays that every launch writes anew.
    nbytes : int
        Device memory of all arrays that the function made.
    """

    def __init__(self, function: Callable[..., T], *arguments: Any) -> None:
        import cupy

        self._arguments = arguments
        self._memory = cupy.cuda.MemoryPool()  # its own: nobody else may be given what the graph writes to
        self._stream = cupy.cuda.get_current_stream()
        with cupy.cuda.using_allocator(self._memory.malloc), recording():
            self._stream.begin_capture()
            try:
                self.result = function(*arguments)
            finally:
                self._graph = self._stream.end_capture()
        self.nbytes = int(self._memory.total_bytes())
        _recorded.add(self)

    def launch(self) -> T:
        """Run it on the stream that it was recorded on; does not wait."""
        self._graph.launch(self._stream)
        return self.result
