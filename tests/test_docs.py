"""What README.md and CONTRIBUTING.md show is run: their Python, and the names in their commands.

The ```python blocks of one file share a namespace, as if typed one after the other, and functions
named test_* that they define are called. Commands are the lines of ```bash blocks.
"""

import functools
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from moe_jax.config import parse_command_line
from moe_jax.routing import ROUTERS

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("README.md", "CONTRIBUTING.md")
FILE = re.compile(r"(?:[\w.-]+/)*[\w.-]+\.(?:py|txt|lock|toml|cfg|md|ipynb|cff|sh)")
FOLDER = re.compile(r"(?:\.ci|configs|docs|experiments|benchmarks|labs|moe_jax|notebooks|tests)/.*")


def blocks(name, language):
    """(first line, text) of a document's fenced blocks of one language."""
    path = ROOT / name
    assert path.is_file(), f"{name} is missing: each of {DOCUMENTS} must exist"
    found, start, opened = [], None, None
    lines = path.read_text(encoding="utf-8").splitlines()
    for i, line in enumerate(lines):
        fence = re.fullmatch(r"\s*```(.*)", line)
        if fence and start is None:
            start, opened = i + 1, fence[1].strip()
        elif fence:
            if opened == language:
                found.append((start + 1, "\n".join(lines[start:i])))
            start = None
    assert start is None, f"{name}:{start}: this fenced block has no end"
    return found


def commands(name):
    """(place, words) of each command of a document; place is the first line of its block."""
    found = []
    for first, text in blocks(name, "bash"):
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            while words:
                stop = next((i for i, w in enumerate(words) if w in ("&&", ";", "|")), len(words))
                found.append((f"{name}:{first}", words[:stop]))
                words = words[stop + 1 :]
    return found


def module_commands(name):
    """(place, module, arguments) of each python -m moe_jax... of a document."""
    for place, words in commands(name):
        for i in range(len(words) - 1):
            if words[i] == "-m" and re.fullmatch(r"moe_jax(\.\w+)+", words[i + 1]):
                yield place, words[i + 1], words[i + 2 :]


@functools.cache
def help_of(module):
    command = [sys.executable, "-m", module, "--help"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture
def registry():
    """Takes the routers of the examples out again."""
    before = dict(ROUTERS)
    yield
    ROUTERS.clear()
    ROUTERS.update(before)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_python_runs(name, registry, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # what an example writes is not left in the repository
    namespace = {"__name__": "__document__"}
    for first, source in blocks(name, "python"):
        padded = "\n" * (first - 1) + source  # so that an error names the line of the document
        exec(compile(padded, str(ROOT / name), "exec", dont_inherit=True), namespace)
    for key, value in list(namespace.items()):
        if key.startswith("test_"):
            value()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_in_commands_exist(name):
    for place, words in commands(name):
        for word in words:
            value = word.partition("=")[2] if word.startswith("--") else word
            value = value.partition(":")[0].removeprefix("./")
            made_by_commands = value.startswith(("runs/", "build/", "dist/", ".venv"))
            if not made_by_commands and (FILE.fullmatch(value) or FOLDER.fullmatch(value)):
                assert (ROOT / value).exists(), f"{place}: {value} does not exist"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_make_targets_exist(name):
    for place, words in commands(name):
        if words[:1] == ["make"]:
            command = ["make", "--dry-run", *words[1:]]
            result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            assert result.returncode == 0, f"{place}: {shlex.join(words)}: {result.stderr}"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_modules_have_help_that_names_the_flags(name):
    for place, module, arguments in module_commands(name):
        result = help_of(module)
        assert result.returncode == 0, f"{place}: {module} --help: {result.stderr}"
        for flag in re.findall(r"^--[a-z_]+", "\n".join(arguments), re.MULTILINE):
            named = re.search(rf"{flag}\b", result.stdout)
            assert named, f"{place}: {module} --help does not name {flag}"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_training_commands_are_valid(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    for _, module, arguments in module_commands(name):
        if module == "moe_jax.train":
            parse_command_line(arguments, usage="")  # ConfigError names what is wrong
