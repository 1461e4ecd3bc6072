"""A table of reports of python -m moe_jax.compile: what a train step costs on different topologies.

Nothing is compiled here: the reports are what the compiler's command wrote with --json.

Example:
  python -m benchmarks.scaling docs/scaling
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import report

_COLUMNS = {
    "config": "config",
    "topology": "topology",
    "mesh": "mesh",
    "tokens": "tokens a step",
    "memory": "memory, GB",
    "sent": "sent, GB",
    "compute": "compute, ms",
    "hbm": "HBM, ms",
    "network": "network, ms",
    "mfu": "MFU",
    "seconds": "compiled in, s",
}


def table(folder: Path) -> str:
    """Markdown, a row for each report, by config and then by the number of chips.

    Memory and what is sent are those of one device; MFU is the estimate if nothing overlaps and if
    everything does.

    Args:
      folder: of the reports, as .json.
    """
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise FileNotFoundError(f"{folder} has no .json")
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    rows = sorted(map(_row, reports), key=lambda row: (row["config"], row["chips"]))
    return report.markdown(rows, _COLUMNS)


def _row(found):
    memory, estimate = found["memory"], found["estimate"]
    sent = sum(row["bytes_sent"] for row in found["traffic"])
    return {
        "config": Path(found["config"].partition(":")[0]).stem,
        "topology": found["topology"],
        "chips": found["num_chips"],
        "mesh": ", ".join(f"{axis} {n}" for axis, n in found["mesh"].items() if n > 1),
        "tokens": f"{found['tokens_per_step']:,}",
        "memory": f"{memory['total'] / 1e9:.1f} of {memory['capacity'] / 1e9:.0f}",
        "sent": sent / 1e9,
        **{name: 1e3 * estimate[name] for name in ("compute", "hbm", "network")},
        "mfu": f"{estimate['mfu_serial']:.0%} to {estimate['mfu_overlapped']:.0%}",
        "seconds": f"{found['compile_seconds']:.0f}",
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    description, _, example = __doc__.partition("Example:")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling",
        description=description,
        epilog="example:" + example,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="of what --json wrote")
    options = parser.parse_args(arguments)
    try:
        print(table(options.folder))
    except (OSError, ValueError, KeyError) as error:
        print(f"error: no report of python -m moe_jax.compile: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
