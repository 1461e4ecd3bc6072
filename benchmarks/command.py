"""What the commands of this folder have in common."""

import argparse
from pathlib import Path


def parser(module: str, doc: str, *, quick: str) -> argparse.ArgumentParser:
    """A parser with --output and --quick, and the module's example below the options.

    Args:
      module: dotted name; results go to a folder of its last part.
      doc: of the module; what follows "Example:" is the example.
      quick: what --quick does.
    """
    description, _, example = doc.partition("Example:")
    result = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        epilog="example:" + example,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    folder = Path("runs/benchmarks") / module.rpartition(".")[2]
    help = "folder of the results (default: %(default)s)"
    result.add_argument("--output", type=Path, default=folder, help=help)
    result.add_argument("--quick", action="store_true", help=quick)
    return result


def positive(text: str) -> int:
    """A whole number of 1 or more.

    Raises:
      argparse.ArgumentTypeError: it is not.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed: whole numbers >= 1")
    return int(text)


def chosen(text: str, allowed) -> list[str]:
    """The names in "A,B".

    Raises:
      argparse.ArgumentTypeError: one that is not allowed.
    """
    names = text.split(",")
    for name in names:
        if name not in allowed:
            raise argparse.ArgumentTypeError(f"got {name!r}; allowed: {', '.join(allowed)}")
    return names


def add_list(parser: argparse.ArgumentParser, option: str, allowed, help: str) -> None:
    """Adds an option that takes "A,B", all names by default."""
    parser.add_argument(
        option,
        type=lambda text: chosen(text, allowed),
        default=list(allowed),
        metavar="A,B",
        help=f"{help} (default: {','.join(allowed)})",
    )
