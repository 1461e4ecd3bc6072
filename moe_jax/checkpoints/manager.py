"""Saving and restoring all that a run needs to go on as if it had never stopped."""

import contextlib
import errno
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from moe_jax.checkpoints.files import (
    CheckpointError,
    check_checkpoint,
    describe_good,
    saved_steps,
    write_manifest,
)
from moe_jax.checkpoints.names import arrays_by_name
from moe_jax.untrusted import parse_json

_METRIC = "cross_entropy"


class Checkpoints:
    """The checkpoints of one run; close it, or use it as a context manager.

    Saving returns once the arrays are copied to the host, so the caller may donate them; files are
    written in the background. A checkpoint gets its name when it is complete, and an older one is
    removed after that. An error in the background is raised by the next call.
    """

    def __init__(self, directory: str | Path, *, keep_last: int, keep_best: int):
        """Opens ``directory`` (made if missing) and removes what a killed run left half-written.

        Args:
          directory: of the checkpoints.
          keep_last: this many latest checkpoints are kept, at least 1,
          keep_best: and this many of those with the lowest cross-entropy.

        Raises:
          CheckpointError: metrics in ``directory`` cannot be read; ``set_aside_damaged`` was not
            called.
        """
        import orbax.checkpoint as ocp

        self._directory = Path(directory).absolute()  # orbax refuses relative paths
        self._saving = None
        policies = ocp.checkpoint_managers
        keep = policies.AnyPreservationPolicy(
            [
                policies.LatestN(keep_last),
                policies.BestN(
                    get_metric_fn=_metric,
                    reverse=True,  # the lowest is the best
                    n=keep_best,
                    keep_checkpoints_without_metrics=False,
                ),
            ]
        )
        try:
            self._manager = ocp.CheckpointManager(
                self._directory,
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=keep,
                    best_fn=_metric,
                    best_mode="min",
                    cleanup_tmp_directories=True,
                    async_options=ocp.options.AsyncOptions(
                        # Runs when all is written, just before the rename.
                        post_finalization_callback=self._before_commit
                    ),
                ),
            )
        except ValueError:  # it reads the metrics of all checkpoints
            for step in saved_steps(self._directory):
                check_checkpoint(self._directory, step)
            raise

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        try:
            self.close()
        except CheckpointError:
            if error is None:  # else it is the consequence of the first error
                raise

    def save(self, step: int, trees: dict[str, Any], *, cross_entropy: float | None = None) -> None:
        """Starts to save the checkpoint of ``step``, after waiting for the one before.

        Args:
          step: larger than any saved one.
          trees: named pytrees of arrays.
          cross_entropy: of the validation at this step, if there was one.

        Raises:
          FloatingPointError: a number in ``trees`` is NaN or infinite; nothing is saved.
          CheckpointError: this one could not be started, or the one before not be written.
        """
        import orbax.checkpoint as ocp

        if not bool(_all_finite(trees)):
            raise FloatingPointError(f"the state after step {step} has NaN or infinite numbers")
        self.wait()
        self._saving = step
        items = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
        metrics = None if cross_entropy is None else {_METRIC: float(cross_entropy)}
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(**items),
                metrics=metrics,
                force=True,  # it is the caller who decides when
            )
        except Exception as error:
            raise self._not_written(error) from error

    def restore(self, step: int, like: dict[str, Any]) -> dict[str, Any]:
        """The trees of a saved step.

        Args:
          step: a checkpoint that ``set_aside_damaged`` found good; it is not checked again.
          like: the trees with ``jax.ShapeDtypeStruct`` (or arrays) as leaves. Each array is put
            where the sharding of its leaf says, wherever it was when it was saved.

        Raises:
          CheckpointError: the checkpoint does not fit ``like``.
        """
        import orbax.checkpoint as ocp

        for name, tree in like.items():
            _check_fit(self._directory / str(step), name, tree)
        items = {name: ocp.args.StandardRestore(_on_device(tree)) for name, tree in like.items()}
        with _told_of(self._directory / str(step)):
            restored = self._manager.restore(step, args=ocp.args.Composite(**items))
        return {name: restored[name] for name in like}

    def wait(self) -> None:
        """Waits until the last save is complete.

        Raises:
          CheckpointError: it could not be written.
        """
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._not_written(error) from error

    def last_good(self, before: int) -> str:
        """Names the last undamaged checkpoint of a step below ``before``, for an error message."""
        with contextlib.suppress(CheckpointError):  # one that fails now is not the last good one
            self.wait()
        return describe_good(self._directory, before=before)

    def close(self) -> None:
        """Waits as ``wait`` does, and ends the background threads."""
        try:
            self._manager.close()
        except Exception as error:
            raise self._not_written(error) from error

    def _before_commit(self):
        if jax.process_index() != 0:  # by now all have written their parts
            return
        [unfinished] = self._directory.glob(f"{self._saving}.*checkpoint-tmp*")
        write_manifest(unfinished)

    def _not_written(self, error):
        reason = "no space left on the device" if _disk_full(error) else _short(error)
        return CheckpointError(
            f"checkpoint {self._directory / str(self._saving)} could not be written: {reason};"
            f" {describe_good(self._directory, before=self._saving)}"
        )


def best_step(directory: str | Path) -> int | None:
    """The saved step of lowest validation cross-entropy; None if no saved step has one."""
    found = {step: validation_cross_entropy(directory, step) for step in saved_steps(directory)}
    found = {step: value for step, value in found.items() if value is not None}
    return min(found, key=found.get) if found else None


def validation_cross_entropy(directory: str | Path, step: int) -> float | None:
    """In nats per token, at a saved step; None if there was no validation at that step."""
    try:
        text = (Path(directory) / str(step) / "metrics" / "metrics").read_bytes()
        value = float(parse_json(text)[_METRIC])
        return value if math.isfinite(value) else None
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None  # or damaged, which restoring the checkpoint would tell


def saved_arrays(directory: str | Path, step: int) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
    """The shapes and dtypes of all arrays of a saved step; reads no array.

    Args:
      directory: of the checkpoints.
      step: one of ``saved_steps``.

    Returns:
      {tree: {path: shape}}, paths such as "blocks/block_0/attention/query/kernel".

    Raises:
      CheckpointError: the checkpoint is damaged.
    """
    checkpoint = Path(directory).absolute() / str(step)
    check_checkpoint(checkpoint.parent, step)
    names = sorted(path.parent.name for path in checkpoint.glob("*/_METADATA"))
    return {name: arrays_by_name(_saved_shapes(checkpoint, name)) for name in names}


def restore_trees(directory: str | Path, step: int, like: dict[str, Any]) -> dict[str, Any]:
    """Some of the named trees of a saved step, for use after training; writes nothing.

    Args:
      directory: of the checkpoints.
      step: one of ``saved_steps``.
      like: the trees by name, with ``jax.ShapeDtypeStruct`` (or arrays) as leaves; one without
        leaves is given back as it is.

    Raises:
      CheckpointError: the checkpoint is damaged, or does not fit ``like``.
    """
    import orbax.checkpoint as ocp

    directory = Path(directory).absolute()
    check_checkpoint(directory, step)
    trees = {}
    with ocp.StandardCheckpointer() as checkpointer:
        for name, tree in like.items():
            trees[name] = tree
            if jax.tree.leaves(tree):
                _check_fit(directory / str(step), name, tree)
                with _told_of(directory / str(step)):
                    path = directory / str(step) / name
                    trees[name] = checkpointer.restore(path, _on_device(tree))
    return trees


def restore_params(directory: str | Path, step: int, like: dict) -> dict:
    """Some of the parameters of a saved step, which ``saved_arrays`` has checked.

    Args:
      directory: of the checkpoints.
      step: one of ``saved_steps``.
      like: nested dict with a part of the saved arrays, of the saved shapes; each array is put
        where the sharding of its leaf says.

    Raises:
      CheckpointError: the checkpoint cannot be read.
    """
    import orbax.checkpoint as ocp

    checkpoint = Path(directory).absolute() / str(step)
    like = _on_device(like)
    options = ocp.checkpoint_utils.construct_restore_args(like)
    restore = ocp.args.PyTreeRestore(item=like, restore_args=options, partial_restore=True)
    with _told_of(checkpoint), ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(checkpoint / "params", args=restore)


@jax.jit
def _all_finite(trees):
    floats = [x for x in jax.tree.leaves(trees) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in floats]))


def _on_device(tree):
    """The shapes of ``tree``, each with a place to restore to."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def place(leaf):
        sharding = getattr(leaf, "sharding", None) or here
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, tree)


def _metric(metrics):
    return metrics[_METRIC]


def _check_fit(checkpoint, name, like):
    """Compares the arrays of a saved tree with those of ``like``.

    Asked before the arrays are read: orbax's own complaint leaves unfinished reads behind, which
    complain in turn.
    """
    saved, wanted = (
        {path.replace("/", "."): _array_type(leaf) for path, leaf in arrays_by_name(tree).items()}
        for tree in (_saved_shapes(checkpoint, name), like)
    )
    for path in saved | wanted:
        got, expected = saved.get(path, "missing"), wanted.get(path, "no such array")
        if got != expected:
            raise CheckpointError(
                f"checkpoint {checkpoint} does not fit this model: {name}.{path} is {got},"
                f" the model has {expected}"
            )


def _saved_shapes(checkpoint, name):
    """The saved tree with ``jax.ShapeDtypeStruct`` as leaves."""
    import orbax.checkpoint as ocp

    if not (checkpoint / name).is_dir():
        raise CheckpointError(f"checkpoint {checkpoint} has no {name}")
    with _told_of(checkpoint), ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.metadata(checkpoint / name).item_metadata.tree
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


@contextlib.contextmanager
def _told_of(checkpoint):
    """Orbax fails in its own many ways on files that a stranger has put together."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"checkpoint {checkpoint} cannot be read: {_short(error)}") from error


def _array_type(leaf):
    return f"{leaf.dtype}{list(leaf.shape)}"


def _disk_full(error):
    while error is not None:
        if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _short(error):
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 200 else f"{text[:200]}..."
