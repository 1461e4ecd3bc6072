import subprocess
import sys

import pytest

from moe_jax.train.__main__ import main

REFUSED = [
    ("--config.steps=abc", "config.steps: got 'abc'; allowed: whole numbers >= 1"),
    ("--config.steps=0", "config.steps: got 0; allowed: whole numbers >= 1"),
    ("--config.steps=1.5", "config.steps: got '1.5'; allowed"),
    ("--config.seed=-1", "config.seed: got -1; allowed: 0..2147483647"),
    ("--config.modl.width=8", "config.modl.width: unknown field; did you mean config.model.width?"),
    ("--config.moe.expets=8", "did you mean config.moe.num_experts? (allowed in config.moe: num"),
    ("--config.moe.k=5", "config.moe.k: got 5; allowed: 1..4 (moe.num_experts)"),
    ("--config.moe.k=0", "config.moe.k: got 0; allowed: whole numbers >= 1"),
    (
        "--config.moe.k=1 --config.router=top_k_softmax",
        "config.moe.k: got 1; allowed: 2 or more with router top_k_softmax",
    ),
    (
        "--config.moe.k=1 --config.routers.softmax_top_k.renormalize",
        "config.routers.softmax_top_k.renormalize: got true; allowed: false when moe.k is 1",
    ),
    ("--config.moe.every=2", "config.moe.every: got 2; allowed: 1..1 (model.num_layers)"),
    (
        "--config.moe.every=2 --config.model.num_layers=3 --config.model.scan_layers",
        "config.model.num_layers: got 3; allowed: multiples of 2 (moe.every)",
    ),
    ("--config.moe.capacity_factor=0", "config.moe.capacity_factor: got 0.0; allowed: numbers > 0"),
    ("--config.moe.capacity_factor=-1", "moe.capacity_factor: got -1.0; allowed: numbers > 0"),
    ("--config.moe.implementation=fast", "moe.implementation: got fast; allowed: dropless, sorted"),
    ("--config.moe.backend=fast", "config.moe.backend: got fast; allowed: xla_cpu, pallas_tpu"),
    (
        "--config.moe.backend=pallas_tpu --config.moe.implementation=dropless",
        "config.moe.backend: got 'pallas_tpu', which is made for tpu, this is cpu",
    ),
    ("--config.moe.priority=last", "moe.priority: got last; allowed: arrival, first_choice, gate"),
    (
        "--config.moe.capacity_scope=shard",
        "config.moe.capacity_scope: got shard; allowed: batch with einsum, and where tokens do not",
    ),
    ("--config.mesh.fsdp=16", "config.mesh: got data 1 x fsdp 16 x expert 1 x tensor 1 = 16 dev"),
    ("--config.mesh.data=3", "config.data.batch_size: got 4; allowed with data 3 x fsdp 1 x exp"),
    ("--config.mesh.expert=8", "config.data.batch_size: got 4; allowed with data 1 x fsdp 1 x exp"),
    ("--config.mesh.tensor=4", "config.mesh.tensor: got 4; allowed: divisors of 2 (config.model.n"),
    (
        "--config.model.width=20 --config.mesh.fsdp=8 --config.data.batch_size=8",
        "config.mesh.fsdp: got 8; allowed: divisors of 20 (config.model.width)",
    ),
    (
        "--config.moe.expert_width=33 --config.mesh.tensor=2",
        "config.mesh.tensor: got 2; allowed: divisors of 33 (config.moe.expert_width)",
    ),
    (
        "--config.moe.num_experts=0 --config.model.mlp_width=33 --config.mesh.tensor=2",
        "config.mesh.tensor: got 2; allowed: divisors of 33 (config.model.mlp_width)",
    ),
    (
        "--config.mesh.expert=2 --config.moe.exchange=ragged",
        "config.moe.exchange: got ragged, which XLA has not for CPUs; allowed: padded, or None",
    ),
    (
        "--config.mesh.expert=2 --config.mesh.expert_nodes=2 --config.moe.exchange=ragged",
        "config.moe.exchange: got ragged; allowed with mesh.expert_nodes 2: padded, or None",
    ),
    ("--config.mesh.expert_nodes=2", "config.mesh.expert_nodes: got 2; allowed: divisors of 1"),
    (
        "--config.mesh.expert=2 --config.moe.exchange=ragged",
        "config.moe.exchange: got ragged, which XLA has not for CPUs; allowed: padded",
    ),
    ("--config.model.num_heads=3", "config.model.num_heads: got 3; allowed: divisors of 16"),
    ("--config.model.num_heads=16", "config.model.num_heads: got 16; allowed: an even head size"),
    ("--config.model.activation=gleu", "config.model.activation: got gleu; allowed: celu, elu"),
    ("--config.model.dtype=int8", "config.model.dtype: got int8; allowed: bfloat16, float32"),
    ("--config.model.dropout=1", "config.model.dropout: got 1.0; allowed: 0 <= number < 1"),
    ("--config.model.glu=maybe", "config.model.glu: got 'maybe'; allowed: true, false"),
    ("--config.model=3", "config.model: a section; allowed: its fields model.width"),
    ("--config.router=random", "config.router: got random; allowed: base_assignment, cosine_top_k"),
    ("--config.data.tokenizer=word", "config.data.tokenizer: got word; allowed: bpe, byte"),
    ("--config.data.dataset=pile", "config.data.dataset: got pile; allowed: sotu"),
    ("--config.data.vocab_size=256", "config.data.vocab_size: got 256; allowed: 257..65535"),
    ("--config.data.timeout_seconds=-1", "data.timeout_seconds: got -1.0; allowed: numbers >= 0"),
    ("--config.on_nonfinite=ignore", "config.on_nonfinite: got ignore; allowed: stop, skip"),
    ("--config.optimizer.learning_rate=nan", "optimizer.learning_rate: got nan; allowed"),
    ("--config.optimizer.warmup_steps=10", "optimizer.warmup_steps: got 10; allowed: 0..9"),
    ("--config.optimizer.accumulate_steps=3", "accumulate_steps: got 3; allowed: divisors of 4"),
    ("--config.steps 3", "command line: got '3'; allowed: --config FILE.py --workdir DIR"),
    ("--wrkdir=x", "Unknown command line flag 'wrkdir'. Did you mean: workdir ?"),
    ("more", "command line: got 'more'"),
]


@pytest.mark.parametrize("overrides, message", REFUSED)
def test_a_users_mistake_is_one_line(command, tmp_path, capsys, overrides, message):
    workdir = tmp_path / "run"
    assert main([*command(workdir), *overrides.split()]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert message in captured.err
    assert captured.out == "" and not workdir.exists()


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "allowed: an existing Python file"),
        ("x = 1", "file.py: has no function get_config"),
        ("def get_config(): return None", "get_config returned None, not a ConfigDict"),
        ("def get_config(): return 1 / 0", "file.py: ZeroDivisionError: division by zero"),
        ("def get_config(a): pass", "file.py: TypeError: get_config() missing 1 required"),
        ("def get_config(:", "file.py: SyntaxError"),
        ("import nothing_like_that", "file.py: ModuleNotFoundError: No module named"),
        (
            "from moe_jax.config import base_config\n"
            "def get_config():\n    c = base_config()\n    c.steps = 'ten'\n    return c",
            "file.py: TypeError: Could not override field 'steps'",
        ),
    ],
)
def test_a_bad_config_file_is_one_line(tmp_path, capsys, content, message):
    path = tmp_path / "file.py"
    if content is not None:
        path.write_text(content)
    assert main(["--config", str(path), "--workdir", str(tmp_path / "run")]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: --config: ") and captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.parametrize("missing", ["--config", "--workdir"])
def test_a_missing_argument_is_one_line(command, tmp_path, capsys, missing):
    line = command(tmp_path)
    at = line.index(missing)
    assert main(line[:at] + line[at + 2 :]) == 1
    assert capsys.readouterr().err.startswith(f"error: {missing}: missing; allowed: ")


def test_the_command_exits_with_the_code_and_without_a_traceback(tmp_path):
    line = [sys.executable, "-m", "moe_jax.train", "--config", "no.py", "--workdir", "x"]
    process = subprocess.run(line, capture_output=True, text=True)
    assert process.returncode == 1
    assert process.stderr == "error: --config: got 'no.py'; allowed: an existing Python file\n"
