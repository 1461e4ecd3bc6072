"""Where the arrays of a run lie: on one device, or spread over a mesh.

Axis legend: B sequences in the batch of all processes.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from moe_jax.dispatch.exchange import OVERLAP_OPTIONS
from moe_jax.sharding import batch_sharding, shardings_of


class Placement(NamedTuple):
    """The mesh of a run; None: its one device, of which jax need not be told."""

    mesh: Mesh | None

    def active(self) -> contextlib.AbstractContextManager:
        """In which everything of the run is traced."""
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    def shardings(self, state: Any) -> Any:
        """Of a state given as arrays or shapes; None on one device."""
        return None if self.mesh is None else shardings_of(state, self.mesh)

    def shapes(self, state: Any) -> Any:
        """The state's shapes, dtypes and places, without what else an array is bound to."""
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
        if self.mesh is None:
            return shapes

        def place(shape, sharding):
            return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

        return jax.tree.map(place, shapes, self.shardings(state))

    def batch_shapes(self, shapes: dict[str, jax.ShapeDtypeStruct]) -> dict:
        """Shapes of batches [B, ...] with their places."""
        if self.mesh is None:
            return shapes
        where = batch_sharding(self.mesh)
        return {
            name: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=where)
            for name, shape in shapes.items()
        }

    def compiler_options(self) -> dict[str, bool] | None:
        """For XLA, where experts are shared: to compute while rows travel."""
        if self.mesh is None or self.mesh.shape["expert"] == 1:
            return None
        return OVERLAP_OPTIONS.get(self.mesh.devices.flat[0].platform)

    def rows(self, batch_size: int) -> list[int]:
        """Which of the B sequences of a batch the devices of this process work on, rising."""
        if self.mesh is None:
            return list(range(batch_size))
        places = batch_sharding(self.mesh).addressable_devices_indices_map((batch_size,))
        return sorted({row for (index,) in places.values() for row in range(batch_size)[index]})

    def put(
        self, batch: dict[str, np.ndarray], rows: Sequence[int], batch_size: int
    ) -> dict[str, jax.Array]:
        """The batch [B, ...] of all processes, each of which gives these of its rows.

        Args:
          batch: [len(rows), ...] each.
          rows: at least those of ``self.rows(B)``.
          batch_size: B.
        """
        if self.mesh is None:
            return batch
        where = batch_sharding(self.mesh)
        place_of_row = {row: place for place, row in enumerate(rows)}

        def put(local):
            def part(index):
                first = index[0].start or 0
                size = len(range(batch_size)[index[0]])
                return local[place_of_row[first] : place_of_row[first] + size]

            shape = (batch_size, *local.shape[1:])
            return jax.make_array_from_callback(shape, where, part)

        return {name: put(np.asarray(local)) for name, local in batch.items()}

    def put_whole(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """The batch [B, ...] that every process has whole."""
        batch_size = len(next(iter(batch.values())))
        return self.put(batch, range(batch_size), batch_size)
