"""What a measurement is held against: what memory and multipliers take at least, and other people's kernels."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from kdtree_nb.bench.ceilings import Ceilings


class Measured(NamedTuple):
    """One kernel's time for one case.

    Attributes
    ----------
    kernel : str
    case : dict
        What was measured, by the headings of its table.
    microseconds : float
    bytes, operations : float
        That the case cannot do without, whatever this kernel does; 0 where they do not matter.
    """

    kernel: str
    case: dict[str, Any]
    microseconds: float
    bytes: float = 0.0
    operations: float = 0.0

    def floor(self, limits: Ceilings) -> float:
        """Microseconds that the bytes take at the measured read bandwidth, or the operations at the product's rate."""
        rate = limits.bf16_tflop_per_s
        return max(self.bytes / limits.read_gb_per_s / 1e3, self.operations / rate / 1e6 if rate else 0.0)


class Row(NamedTuple):
    """A case in the table: every kernel's microseconds, and the first one's beside its floor and the best peer."""

    case: dict[str, Any]
    microseconds: dict[str, float]
    floor: float
    of_floor: float | None
    best_peer: str | None
    of_best_peer: float | None


def table(measured: Sequence[Measured], limits: Ceilings, peers: Collection[str] = ()) -> list[Row]:
    """One row a case, in the order in which the cases first came; ratios below 1 are faster than what they are of."""
    cases: list[list[Measured]] = []
    for one in measured:
        same = next((found for found in cases if found[0].case == one.case), None)
        if same is None:
            cases.append([one])
        else:
            same.append(one)
    rows = []
    for ours, *others in cases:
        floor = ours.floor(limits)
        best = min((one for one in others if one.kernel in peers), key=lambda one: one.microseconds, default=None)
        rows.append(
            Row(
                ours.case,
                {one.kernel: one.microseconds for one in (ours, *others)},
                floor,
                ours.microseconds / floor if floor else None,
                best.kernel if best else None,
                ours.microseconds / best.microseconds if best else None,
            )
        )
    return rows
