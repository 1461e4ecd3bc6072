"""What the documents show is run: their Python, and the names in their commands.

The ```python blocks of one file share a namespace, as if typed one after the other, and functions
named test_* that they define are called. Commands are the lines of ```bash blocks. What
docs/routers.md says of every router is compared with the registry.
"""

import functools
import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from moe_jax.config import parse_command_line
from moe_jax.routing import (
    ROUTERS,
    ExpertChoice,
    ExpertMerge,
    RouterInputs,
    SoftChoice,
    TokenChoice,
    default_arguments,
    make_router,
)
from moe_jax.train.flags import take_flags

ROOT = Path(__file__).resolve().parents[1]
ROUTERS_PAGE = "docs/routers.md"
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    ROUTERS_PAGE,
    "docs/performance.md",
    "docs/checkpoints.md",
    "docs/distributed.md",
    "docs/faults.md",
    "docs/scaling.md",
)
# What the column "causal" says of Router.sees_future, and the column "choice" of choice_type.
CAUSAL = {
    "never": "yes",
    "training": "training sees the batch; evaluation is causal",
    "always": "no",
}
CHOICES = {TokenChoice: "token", ExpertChoice: "expert", SoftChoice: "soft", ExpertMerge: "merge"}
FILE = re.compile(r"(?:[\w.-]+/)*[\w.-]+\.(?:py|txt|lock|toml|cfg|md|ipynb|cff|sh)")
FOLDER = re.compile(
    r"(?:\.ci|cluster|configs|docs|experiments|benchmarks|labs|moe_jax|notebooks|tests)/.*"
)


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


def links(name):
    """Targets, relative to the document, of its pictures and of its links to files."""
    text = (ROOT / name).read_text(encoding="utf-8")
    text = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"\]\(([^()\s]+)\)", text)
    return [target.partition("#")[0] for target in found if not target.startswith(("http", "#"))]


def section(name, router):
    """The lines under the heading ### router, down to the next heading."""
    text = (ROOT / name).read_text(encoding="utf-8")
    found = re.search(rf"^### {router}\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"{name}: no section '### {router}'"
    return found[1]


def bullet(text, title):
    """The text of the list item "- **title**: ..." of a section, on one line."""
    found = re.search(rf"^- \*\*{title}\*\*:(.*?)(?=^- |^```|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"no item '- **{title}**:' in {text!r}"
    return " ".join(found[1].split())


def parsed(text):
    """What a config reads from a text."""
    words = {"true": True, "false": False, "None": None}
    return words[text] if text in words else float(text)


def names_in(cell):
    """The `names` in a cell of a table."""
    return set(re.findall(r"`(\w+)`", cell))


def declarations(method):
    """The names of what a router learns, of its state and of its own losses in training."""

    def use(key):
        weights = {name: jnp.zeros(weight.shape) for name, weight in method.weights(4, 8).items()}
        state = method.state(key, weights, 8)
        inputs = RouterInputs(jnp.zeros((16, 4)), None, jnp.zeros(16, jnp.int32), key)
        return weights, state, method.route(inputs, weights, state).losses

    return jax.eval_shape(use, jax.random.key(0))


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
def test_python_runs(name, registry, quick_compilation, monkeypatch, tmp_path):
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
            _, arguments = take_flags(arguments)
            parse_command_line(arguments, usage="")  # ConfigError names what is wrong


@pytest.mark.parametrize("name", DOCUMENTS)
def test_pictures_and_linked_files_exist(name):
    for target in links(name):
        assert ((ROOT / name).parent / target).exists(), f"{name}: {target} does not exist"


@pytest.mark.parametrize("router", sorted(ROUTERS))
def test_every_router_has_a_section(router):
    text = section(ROUTERS_PAGE, router)
    for title in ("Source", "Learned", "Configured", "State", "Losses", "Cost", "Causal"):
        assert bullet(text, title), f"{router}: nothing under {title}"
    documented = re.findall(r"`(\w+)=([^`]+)`", bullet(text, "Configured"))
    defaults = {argument: parsed(default) for argument, default in documented}
    assert defaults == default_arguments()[router]
    shown = re.findall(r"^```bash\n(.+)\n```$", text, re.MULTILINE)
    assert len(shown) == 1 and f"--config.router={router} " in shown[0] + " "
    leaks = make_router(router, k=2).sees_future == "always"
    assert leaks == ("--config.moe.allow_future_leak=true" in shown[0])


def test_no_section_is_of_an_unknown_router():
    headings = re.findall(r"^### (.+)$", (ROOT / ROUTERS_PAGE).read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(ROUTERS)


def test_the_summary_of_routers_is_what_they_are():
    text = (ROOT / ROUTERS_PAGE).read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.MULTILINE)
    assert sorted(router for router, _ in rows) == sorted(ROUTERS)
    for router, row in rows:
        choice, learned, state, losses, balance, z, causal = row.split(" | ")
        method = make_router(router, k=2)
        assert choice == CHOICES[method.choice_type], router
        assert causal == CAUSAL[method.sees_future], router
        weights = [None if cell == "-" else float(cell) for cell in (balance, z)]
        assert weights == list(method.default_losses), router
        declared = tuple(set(names) for names in declarations(method))
        assert tuple(map(names_in, (learned, state, losses))) == declared, router


def test_the_table_of_train_steps_is_what_the_compiler_reported(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)  # benchmarks lie beside the package
    scaling = importlib.import_module("benchmarks.scaling")
    text = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    assert scaling.table(ROOT / "docs" / "scaling") in text
