"""Groups: the processes that a collective exchanges data with, by dimensions of device meshes.

takes: the meshes of DTensors, names of process groups. returns: `MeshGroup`, equal in all processes
of a mesh but for its name.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from rockplan.values.graph import MeshGroup


class MeshGroups:
    """Those of one recording."""

    def __init__(self) -> None:
        self._meshes: set[Any] = set()
        self._dimensions: dict[str, tuple[str, int]] = {}
        self._known: dict[str, MeshGroup] = {}
        self._count: Counter[tuple[str, int]] = Counter()

    def add(self, mesh: Any) -> None:
        """Note the process groups of the dimensions of `mesh`."""
        if mesh not in self._meshes:
            self._meshes.add(mesh)
            names = mesh.mesh_dim_names or map(str, range(mesh.ndim))
            for number, dimension in enumerate(names):
                name = mesh.get_group(number).group_name
                self._dimensions.setdefault(name, (dimension, mesh.size(number)))

    def named(self, argument: Any) -> Any:
        """Return what a plan has in place of `argument` of a collective: a MeshGroup for the name
        of a process group of a known mesh, else the argument itself."""
        if not isinstance(argument, str) or argument not in self._dimensions:
            return argument
        if argument not in self._known:
            dimension = self._dimensions[argument]
            self._known[argument] = MeshGroup(*dimension, self._count[dimension], argument)
            self._count[dimension] += 1
        return self._known[argument]
