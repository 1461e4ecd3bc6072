"""Some of the parameters of another run's checkpoint, chosen and renamed by rules over paths.

A rule is ``pattern`` or ``pattern->replacement``: a regular expression for a whole path, such as
"blocks/.*/attention/.*", and the path in the model, in which \\1 stands for the first group. Rules
stand in a list with commas; the first that matches a path counts.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from moe_jax.checkpoints.files import CheckpointError, saved_steps
from moe_jax.checkpoints.manager import restore_params, saved_arrays
from moe_jax.checkpoints.names import arrays_by_name, trees_by_name

_LAYOUTS = ("blocks/", "scanned_blocks/")


class Rule(NamedTuple):
    """A compiled rule; without a replacement paths stay as they are."""

    pattern: re.Pattern
    replacement: str | None

    def rename(self, path: str) -> str | None:
        """The path in the model; None if the pattern does not match ``path``."""
        match = self.pattern.fullmatch(path)
        if match is None or self.replacement is None:
            return path if match else None
        return match.expand(self.replacement)


def parse_rules(text: str) -> list[Rule]:
    """The rules of a comma-separated list.

    Raises:
      ValueError: names the rule that is none.
    """
    rules = []
    for part in text.split(","):
        pattern, arrow, replacement = part.strip().partition("->")
        try:
            rule = Rule(re.compile(pattern), replacement if arrow else None)
            if arrow:  # is a group in it that the pattern has not?
                re.compile(f"(?:{pattern})|").sub(replacement, "")
        except (re.error, IndexError, OverflowError, RecursionError) as error:
            raise ValueError(f"{part.strip()!r} is no rule ({error})") from None
        if not pattern or (arrow and not replacement):
            raise ValueError(f"{part.strip()!r} is no rule (it is empty)")
        rules.append(rule)
    return rules


def take_parameters(
    params: dict, checkpoint: str | Path, rules: Sequence[Rule]
) -> tuple[dict, str]:
    """``params`` with some arrays of another run's in place of their own.

    Args:
      params: nested dict of arrays, which say where the arrays taken are to lie.
      checkpoint: a workdir of a run, or its folder of checkpoints; the last one is taken.
      rules: of ``parse_rules``.

    Returns:
      The parameters, and a line that says how many were taken.

    Raises:
      CheckpointError: there is no checkpoint, a rule takes nothing, or an array has no place.
    """
    directory = Path(checkpoint)
    directory = directory / "checkpoints" if (directory / "checkpoints").is_dir() else directory
    steps = saved_steps(directory)
    if not steps:
        raise CheckpointError(f"{directory}: has no checkpoint")
    saved = saved_arrays(directory, steps[-1]).get("params", {})
    arrays = arrays_by_name(params)
    sources = _sources(saved, arrays, rules)
    like = trees_by_name({source: arrays[target] for target, source in sources.items()})
    restored = arrays_by_name(restore_params(directory, steps[-1], like))
    taken = {target: restored[source] for target, source in sources.items()}
    sizes = [sum(array.size for array in some.values()) for some in (taken, arrays)]
    line = (
        f"took {len(taken)} of {len(arrays)} arrays, {sizes[0]:,} of {sizes[1]:,} parameters,"
        f" from {directory / str(steps[-1])}"
    )
    return trees_by_name(arrays | taken), line


def _sources(saved: dict[str, Any], wanted: dict[str, Any], rules: Sequence[Rule]):
    """{path in the model: path in the checkpoint} of what is taken."""
    sources, used = {}, set()
    for source, shape in saved.items():
        found = [(rule, rule.rename(source)) for rule in rules]
        rule, target = next((pair for pair in found if pair[1] is not None), (None, None))
        if rule is None:
            continue
        used.add(rule)
        _check_target(source, shape, target, wanted)
        if target in sources:
            raise CheckpointError(f"{target}: {sources[target]} and {source} are both to be it")
        sources[target] = source
    for rule in rules:
        if rule not in used:
            raise CheckpointError(
                f"rule {rule.pattern.pattern}: takes no array; the checkpoint has"
                f" {', '.join(list(saved)[:4])}, ..."
            )
    return sources


def _check_target(source, shape, target, wanted):
    """Checks that the model has a place for an array."""
    for layout in _LAYOUTS:
        if target.startswith(layout) and not any(name.startswith(layout) for name in wanted):
            has = "one by one" if layout == "blocks/" else "scanned"
            raise CheckpointError(
                f"{source}: the layers of the checkpoint are {has}, and this model's are not;"
                " allowed: the same model.scan_layers, or rules that leave the layers out"
            )
    if target not in wanted:
        raise CheckpointError(f"{source}: the model has no {target}; allowed: paths that it has")
    got, expected = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (shape, wanted[target]))
    if (got.shape, got.dtype) != (expected.shape, expected.dtype):
        raise CheckpointError(
            f"{source}: got {got.dtype}{list(got.shape)}; allowed: {expected.dtype}"
            f"{list(expected.shape)}, as {target} of the model has"
        )
