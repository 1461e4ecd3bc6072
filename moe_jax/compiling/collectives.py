"""What the devices of a compiled program send each other, read off its text.

Pure functions of the optimised HLO. Bytes are those that one device sends with the usual
algorithms on a group of n devices: an all-gather or all-to-all of a result of R bytes sends
R (n-1)/n, a reduce-scatter of an operand of R bytes as much, an all-reduce twice that, a permute R.
A ragged all-to-all is counted with every row in use and spread evenly: the smaller one of its
buffers, since the larger one has room for the worst case.
"""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

KINDS = (
    "ragged-all-to-all",
    "all-to-all",
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "collective-permute",
    "collective-broadcast",
)
_BITS = dict(pred=8, s4=4, u4=4, s8=8, u8=8, s16=16, u16=16, s32=32, u32=32, s64=64, u64=64)
_BITS |= dict(bf16=16, f16=16, f32=32, f64=64, c64=64, c128=128)

_HEADER = re.compile(r"(ENTRY )?%?([\w.-]+) .*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.-]+) = (.*)")
_OPCODE = re.compile(r" ([a-z][a-z0-9-]*)\(")
_CALLED = re.compile(r"(?:calls|to_apply|body|\w+_computations?)=(\{[^}]*\}|%?[\w.-]+)")
_ARRAY = re.compile(r"\b(\w+)\[([\d,<=]*)\]")


class Collective(NamedTuple):
    """One collective instruction.

    Attributes:
      kind: one of KINDS.
      bytes_sent: by one device each time.
      groups: lists of partitions that take part together, or pairs of sender and receiver; None if
        the text has a form that is not known here.
      times: how often it runs in the program.
      certain: False: it is in a loop whose number of rounds the text does not tell, counted as one.
    """

    kind: str
    bytes_sent: float
    groups: list[list[int]] | None
    times: int
    certain: bool


class _Instruction(NamedTuple):
    name: str
    type: str
    opcode: str
    arguments: str
    attributes: str

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.-]+)", self.arguments)


def find_collectives(text: str) -> list[Collective]:
    """All collectives of an optimised HLO module."""
    computations, entry = _computations(text)
    partitions = re.search(r"num_partitions=(\d+)", text)
    num_devices = int(partitions[1]) if partitions else 1
    found = {}

    def within(name):
        """(computation, instruction, times, certain) of one run of a computation."""
        if name not in found:
            found[name] = list(visit(name))
        return found[name]

    def visit(name):
        for instruction in computations.get(name, {}).values():
            kind = instruction.opcode.removesuffix("-start")
            if kind in KINDS:
                yield name, instruction, 1, True
            elif not instruction.opcode.endswith(("-done", "-update")):
                times = _rounds(instruction, computations) if instruction.opcode == "while" else 1
                for called in _called(instruction.attributes):
                    for where, inner, count, certain in within(called):
                        yield where, inner, count * (times or 1), certain and times is not None

    return [
        _collective(where, computations[where], instruction, num_devices)._replace(
            times=times, certain=certain
        )
        for where, instruction, times, certain in within(entry)
    ]


def axes_of(groups: list[list[int]] | None, mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of a mesh along which the members of a group differ.

    Args:
      groups: of partitions, which jax numbers in row-major order of the mesh.
      mesh_shape: sizes by axis, the major one first.

    Returns:
      Names in the order of the mesh; ("unknown",) for groups that are not known.
    """
    if groups is None:
        return ("unknown",)
    differing = np.zeros(len(mesh_shape), bool)
    for group in groups:
        places = np.array(np.unravel_index(group, tuple(mesh_shape.values())))
        differing |= np.any(places != places[:, :1], axis=1)
    return tuple(axis for axis, differs in zip(mesh_shape, differing, strict=True) if differs)


def crosses_nodes(groups: list[list[int]] | None, devices_per_node: int) -> bool:
    """Whether members of a group are on different nodes, each of so many devices in order."""
    if groups is None:
        return False
    return any(len({member // devices_per_node for member in group}) > 1 for group in groups)


def type_bytes(text: str) -> int:
    """Bytes of an HLO type: an array such as bf16[2,8]{1,0}, or a tuple of such."""
    total = 0
    for name, sizes in _ARRAY.findall(text):
        bits = 8 if name.startswith("f8") else _BITS.get(name, 0)
        sizes = [int(size.removeprefix("<=")) for size in sizes.split(",") if size]
        total += math.prod(sizes) * bits // 8
    return total


def parse_groups(attributes: str, num_devices: int) -> list[list[int]] | None:
    """The groups that the attributes of a collective name, in any of the forms of the compilers.

    These are {{0,1},{2,3}}, {} for everybody together, [2,4]<=[4,2]T(1,0) for an iota of shape
    [4,2], transposed, as groups [2,4], mesh['a'=2,'b'=4] {'b'} for lines of a mesh (of devices in
    another order: mesh[...], device_ids=([2,4]T(1,0)) {'b'}), and source_target_pairs. None:
    another form.
    """
    start = re.search(r"(?:replica_groups|source_target_pairs)=(.*)", attributes)
    if start is None:
        return None
    text = start[1]
    if explicit := re.match(r"\{((?:\{[\d,]*\},?)*)\}", text):
        groups = re.findall(r"\{([\d,]+)\}", explicit[1])
        groups = [[int(member) for member in group.split(",")] for group in groups]
        return groups or [list(range(num_devices))]
    if iota := re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape, tile, order = (None if n is None else _integers(n) for n in iota.groups())
        return _iota(tile, order).reshape(shape).tolist()
    order = r"(?:, device_ids=\(\[([\d,]+)\]T\(([\d,]+)\)\))?"
    if mesh := re.match(rf"mesh\[((?:'\w+'=\d+,?)+)\]{order} \{{([^}}]*)\}}", text):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        places = _lines_of_mesh(sizes, re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", mesh[4]))
        if mesh[2]:
            ids = _iota(_integers(mesh[2]), _integers(mesh[3])).ravel()
            places = [ids[place].tolist() for place in places]
        return places
    return None


def _iota(shape, order):
    """0, 1, ... in that shape, transposed."""
    ids = np.arange(math.prod(shape)).reshape(shape)
    return ids if order is None else ids.transpose(order)


def _lines_of_mesh(sizes, axes):
    """The groups along axes, or along the ``length`` parts of one that come after ``before``."""
    names = list(sizes)
    ids = first = np.arange(math.prod(sizes.values()))
    for name, before, length in axes:
        before, length = int(before or 1), int(length or sizes[name])
        inside = math.prod(sizes[other] for other in names[names.index(name) + 1 :])
        step = inside * sizes[name] // (before * length)
        first = first - ids // step % length * step
    return [ids[first == key].tolist() for key in np.unique(first)]


def _integers(text):
    return [int(number) for number in text.split(",")]


def _computations(text):
    """{computation: {instruction name: _Instruction}}, and the name of the entry."""
    computations, entry, current = {}, None, {}
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = computations.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
        elif match := _INSTRUCTION.match(line):
            # A type may have parentheses, but no space before them and a word before that.
            opcode = _OPCODE.search(f" {match[2]}")
            if opcode:
                rest = f" {match[2]}"[opcode.end() :]
                inside, _, attributes = rest.partition(")")
                kind = f" {match[2]}"[: opcode.start()]
                current[match[1]] = _Instruction(match[1], kind, opcode[1], inside, attributes)
    return computations, entry


def _called(attributes):
    """Names of the computations that an instruction runs."""
    names = " ".join(_CALLED.findall(attributes))
    return re.findall(r"[\w.-]+", names)


def _rounds(loop, computations):
    """How often the body of a while runs; None if the text does not tell.

    Compilers for TPU do not write it down. The loops of jax count from 0 to a constant.
    """
    known = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if known:
        return int(known[1])
    condition = re.search(r"condition=%?([\w.-]+)", loop.attributes)
    instructions = computations.get(condition[1], {}) if condition else {}
    if not instructions:
        return None
    root = list(instructions.values())[-1]
    bound = instructions.get(root.operands[-1]) if root.operands else None
    if root.opcode != "compare" or "direction=LT" not in root.attributes or bound is None:
        return None
    return int(bound.arguments) if bound.opcode == "constant" else None


def _collective(where, instructions, instruction, num_devices):
    kind = instruction.opcode.removesuffix("-start")
    groups = parse_groups(instruction.attributes, num_devices)
    size = len(groups[0]) if groups else num_devices
    operand, result = _operand_and_result(instruction, instructions)
    share = (size - 1) / size
    if kind == "all-reduce" and where.startswith("all-reduce-scatter"):
        # A fusion of TPU, whose devices keep a part of the sum each.
        kind, sent = "reduce-scatter", result * share
    elif kind == "all-reduce":
        sent = 2 * result * share
    elif kind == "reduce-scatter":
        sent = result * (size - 1)
    elif kind == "ragged-all-to-all":
        sent = min(operand or result, result) * share
    elif kind in ("collective-permute", "collective-broadcast"):
        sent = result
    else:
        sent = result * share
    return Collective(kind, sent, groups, 1, True)


def _operand_and_result(instruction, instructions):
    """Bytes of the first operand (0: not known) and of the result."""
    first = instructions.get(instruction.operands[0]) if instruction.operands else None
    operand = type_bytes(first.type) if first else 0
    if not instruction.opcode.endswith("-start"):
        return operand, type_bytes(instruction.type)
    parts = _parts(instruction.type)
    if parts and parts[0].startswith("("):  # ((operands), result, ...)
        return type_bytes(_parts(parts[0])[0]), type_bytes(parts[1])
    if parts and "all-reduce" not in instruction.opcode:  # (operand, result, ...)
        return type_bytes(parts[0]), type_bytes(parts[1])
    return operand, type_bytes(instruction.type)


def _parts(type_text):
    """The members of a tuple type; [] for an array."""
    text = re.sub(r"/\*.*?\*/", "", type_text).strip()
    if not text.startswith("("):
        return []
    parts, depth, last = [], 0, 1
    for place, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if (letter == "," and depth == 1) or (letter == ")" and depth == 0):
            parts.append(text[last:place].strip())
            last = place + 1
    return parts
