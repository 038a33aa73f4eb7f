"""A linear program that is built row by row, for lower bounds of the iteration time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Columns = NDArray[np.int64]
Term = tuple[Columns | int, Floats | float]  # variables, and the coefficients that they are multiplied by


@dataclass
class Rows:
    """The variables and rows of a linear program. A row says that a sum of terms is at most, or exactly, a limit.

    Variables are at least 0.

    Attributes:
        names: Names of the rows, such as "DRAM bandwidth", for reports of what limits the result. Rows
            without a name are not reported.
    """

    upper: list[float] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    least: list[float] = field(default_factory=list)
    most: list[float] = field(default_factory=list)
    _columns: list[int] = field(default_factory=list)
    _values: list[float] = field(default_factory=list)
    _ends: list[int] = field(default_factory=lambda: [0])

    def new(self, count: int) -> Columns:
        """Add ``count`` variables to a linear program, and return the numbers of their columns."""
        first = len(self.upper)
        self.upper += [np.inf] * count
        return np.arange(first, first + count)

    def one(self) -> int:
        """Add one variable to a linear program, and return the number of the variable's column."""
        return int(self.new(1)[0])

    def at_most(self, limit: float, *terms: Term, name: str = "", least: float = -np.inf) -> None:
        """Add a row to a linear program: the sum of ``terms`` is at most ``limit`` and at least ``least``.

        Args:
            name: Name of the row, for reports of what limits the result. Rows without a name are not reported.
        """
        for some, factor in terms:
            columns = some.tolist() if isinstance(some, np.ndarray) else [int(some)]
            self._columns += columns
            if isinstance(factor, np.ndarray):
                self._values += factor.tolist()
            else:
                self._values += [float(factor)] * len(columns)
        self._ends.append(len(self._columns))
        self.names.append(name)
        self.most.append(limit)
        self.least.append(least)

    def equal(self, value: float, *terms: Term) -> None:
        self.at_most(value, *terms, least=value)

    def lowest(self, *terms: Term) -> tuple[float, Floats] | None:
        """Solve a linear program: return the minimum of a sum of terms, and the values of all variables at this
        minimum.

        Return None if no values satisfy all constraints of the program.
        """
        from scipy.optimize import Bounds, LinearConstraint, milp

        cost = np.zeros(len(self.upper))
        for columns, factor in terms:
            cost[columns] += factor
        limits = LinearConstraint(self._matrix(), self.least, self.most)
        solved = milp(cost, bounds=Bounds(0.0, np.array(self.upper)), constraints=limits)
        return None if solved.x is None else (float(solved.fun), np.asarray(solved.x))

    def full(self, x: Floats) -> tuple[str, ...]:
        """Return the names of the rows of a linear program that hold with equality in a solution, and so limit it."""
        left = np.array(self.most) - self._matrix() @ x
        scale = 1e-7 * max(1.0, float(np.abs(x).max()))
        names = (n for n, rest in zip(self.names, left, strict=True) if n and rest <= scale)
        return tuple(dict.fromkeys(names))

    def _matrix(self) -> Any:  # Any, because scipy's sparse arrays have no types
        from scipy.sparse import csr_array

        rows = (self._values, self._columns, self._ends)
        made = csr_array(rows, shape=(len(self.most), len(self.upper)))
        made.sum_duplicates()
        return made
