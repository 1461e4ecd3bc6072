"""Inside ``jax.shard_map``, where a type says over which mesh axes a value varies."""

import jax


def vary_alike(*trees):
    """The same arrays, all varying over every axis that one of them varies over.

    A gradient rule must return the types it was given, and the gradient of a weight that all
    devices share varies from device to device. The transpose of this cast sums it, in one place.
    """
    axes = frozenset().union(*(jax.typeof(leaf).mat.varying for leaf in jax.tree.leaves(trees)))

    def cast(leaf):
        missing = axes - jax.typeof(leaf).mat.varying
        return jax.lax.pcast(leaf, tuple(missing), to="varying") if missing else leaf

    return jax.tree.map(cast, trees)


def result_type(shape, dtype, *operands) -> jax.ShapeDtypeStruct:
    """The type of a kernel's result, which varies over the axes that its operands vary over.

    The operands vary alike, as ``vary_alike`` makes them, or not at all.
    """
    types = [jax.typeof(leaf).mat for leaf in jax.tree.leaves(operands)]
    return jax.ShapeDtypeStruct(
        shape, dtype, manual_axis_type=max(types, key=lambda mat: len(mat.varying))
    )
