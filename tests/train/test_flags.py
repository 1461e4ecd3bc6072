import pytest

from moe_jax.config import ConfigError
from moe_jax.train.flags import Cluster, take_flags


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--coordinator a:1", "--distributed: allowed: alone, or instead of it all of"),
        ("--distributed --coordinator a:1 --num_processes 2 --process_index 0", "allowed: alone"),
        ("--coordinator a:1 --num_processes 2 --process_index 2", "got 2; allowed: 0..N-1 with"),
        ("--coordinator a:1 --num_processes two --process_index 0", "--num_processes: got 'two'"),
        ("--num_processes 2 --process_index -1", "--process_index: "),
        ("--max_restarts=-1", "^--max_restarts: got '-1'; allowed: whole numbers >= 0"),
        ("--max_restarts x", "^--max_restarts: got 'x'; allowed: whole numbers >= 0"),
        ("--max_restarts", "^--max_restarts: expected one argument"),
        ("--profile=5", "--profile: "),
    ],
)
def test_flags_that_do_not_fit(arguments, message):
    with pytest.raises(ConfigError, match=message):
        take_flags(arguments.split())


def test_processes():
    flags, rest = take_flags(["--config", "x"])
    assert flags.cluster is None and rest == ["--config", "x"]
    flags, rest = take_flags(["--distributed", "--workdir", "x"])
    assert flags.cluster == Cluster() and rest == ["--workdir", "x"]
    flags, rest = take_flags(
        "--coordinator a:1 --config.steps=3 --num_processes=2 --process_index 1".split()
    )
    assert flags.cluster == Cluster("a:1", 2, 1) and rest == ["--config.steps=3"]


def test_a_child_gets_all_but_its_restarts():
    line = "--profile --distributed --config x".split()
    flags, rest = take_flags(["--max_restarts", "3", *line])
    assert flags == (Cluster(), True, 3, line) and rest == ["--config", "x"]
    assert take_flags(line)[0] == (Cluster(), True, 0, line)
