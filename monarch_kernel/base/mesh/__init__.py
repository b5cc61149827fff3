"""Shapes of meshes and values that have such a shape; pure data, no I/O."""

from monarch_kernel.base.mesh.extent import Extent, Point
from monarch_kernel.base.mesh.shape import AxisIndex, Region, Shaped
from monarch_kernel.base.mesh.values import ValueMesh

__all__ = ["AxisIndex", "Extent", "Point", "Region", "Shaped", "ValueMesh"]
