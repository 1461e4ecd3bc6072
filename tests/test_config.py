import inspect
import json

import jax
import jax.numpy as jnp
import pytest

from moe_jax import config as config_module
from moe_jax.config import (
    FIELDS,
    ConfigError,
    base_config,
    config_from_json,
    config_to_json,
    differences,
    parse_command_line,
    resolve_runs,
    validate,
)
from moe_jax.routing import ROUTERS, default_arguments, make_router
from moe_jax.train.build import make_method, make_weights

CONFIG_FILE = """
from moe_jax.config import base_config

def get_config(variant=""):
    config = base_config()
    if variant == "compare":
        config.variants = {"dense": {"moe": {"num_experts": 0}}, "moe": {}}
    elif variant:
        config.steps = int(variant)
    return config
"""


@pytest.fixture
def command(tmp_path):
    """(*overrides, argument) -> the config that the command line gives."""
    path = tmp_path / "file.py"
    path.write_text(CONFIG_FILE)

    def parse(*overrides, argument=""):
        arguments = ["--config", f"{path}{argument}", "--workdir", str(tmp_path / "runs")]
        config, workdir = parse_command_line([*arguments, *overrides], usage="Trains.")
        assert workdir == tmp_path / "runs"
        return config

    return parse


def test_base_config_is_valid_and_has_every_field():
    config = base_config()
    validate(config)
    [(name, run)] = resolve_runs(config).items()
    assert name == "" and "variants" not in run
    for path, field in FIELDS.items():
        value = config
        for part in path.split("."):
            value = value[part]
        assert value == field.default, path


def test_json_is_plain_data_and_comes_back_exactly():
    config = base_config()
    config.optimizer.learning_rate = 0.1 + 0.2  # 0.30000000000000004
    config.moe.capacity_factor = 1.25
    config.variants = {"dense": {"moe": {"num_experts": 0, "capacity_factor": None}}}
    text = config_to_json(config)
    back = config_from_json(text)
    assert config_to_json(back) == text
    assert back.optimizer.learning_rate == 0.30000000000000004
    assert back.data.cache_dir is None and back.seed == 0 and type(back.seed) is int
    assert resolve_runs(back) == resolve_runs(config)
    for run in resolve_runs(config).values():
        assert config_from_json(config_to_json(run)) == run
        assert resolve_runs(run) == {"": run}
        validate(run)


def test_json_refuses_what_is_no_data():
    config = base_config()
    config.optimizer.learning_rate = float("nan")
    with pytest.raises(ConfigError, match="not plain data"):
        config_to_json(config)
    for text in ("[1]", "{", "3"):
        with pytest.raises(ConfigError, match="JSON"):
            config_from_json(text)


def test_only_the_chosen_routers_arguments_stay():
    config = base_config()
    config.router = "softmax_top_k"
    config.routers.softmax_top_k.renormalize = True
    [run] = resolve_runs(config).values()
    assert run.routers.to_dict() == {"softmax_top_k": {"renormalize": True}}
    config.router = "top_k_softmax"
    [run] = resolve_runs(config).values()
    assert run.routers.to_dict() == {"top_k_softmax": {}}


def test_variants_override_the_base_and_nothing_else():
    config = base_config()
    config.variants = {
        "dense": {"moe": {"num_experts": 0}, "steps": 50},
        "k1": {"moe": {"k": 1}, "optimizer": {"learning_rate": 1}},
    }
    validate(config)
    runs = resolve_runs(config)
    assert list(runs) == ["dense", "k1"]
    assert (runs["dense"].moe.num_experts, runs["dense"].steps, runs["dense"].moe.k) == (0, 50, 2)
    assert (runs["k1"].moe.num_experts, runs["k1"].steps, runs["k1"].moe.k) == (8, 300, 1)
    assert type(runs["k1"].optimizer.learning_rate) is float
    assert base_config().moe.num_experts == 8


@pytest.mark.parametrize(
    "variants, message",
    [
        ({"a": {"moe": {"expets": 3}}}, "config.variants.a.moe.expets: unknown field"),
        ({"a": {"steps": 0}}, "config.variants.a.steps: got 0; allowed: whole numbers >= 1"),
        ({"a": {"moe": {"k": 9}}}, "config.moe.k: got 9; allowed: 1..8 .* .variant a."),
        ({"a/b": {}}, "config.variants: got the name 'a/b'"),
        ({"checkpoints": {}}, "config.variants: got the name 'checkpoints'"),
        ({"a": 3}, "config.variants.a: got 3; allowed: a nested dict"),
    ],
)
def test_a_bad_variant_is_refused(variants, message):
    config = base_config()
    config.variants = variants
    with pytest.raises(ConfigError, match=message):
        validate(config)


def test_overrides_change_the_config(command):
    config = command(
        "--config.steps=7",
        "--config.optimizer.warmup_steps=0",
        "--config.optimizer.learning_rate=1",
        "--config.moe.capacity_factor=2",
        "--config.data.cache_dir=/somewhere",
        "--config.model.glu",
        "--noconfig.model.tie_embeddings",
    )
    assert config.steps == 7
    assert config.optimizer.learning_rate == 1.0
    assert config.moe.capacity_factor == 2.0
    assert config.data.cache_dir == "/somewhere"
    assert config.model.glu is True and config.model.tie_embeddings is False
    config = command("--config.moe.capacity_factor=2", "--config.moe.capacity_factor=None")
    assert config.moe.capacity_factor is None


def test_the_argument_of_a_config_file_reaches_get_config(command):
    assert command(argument=":77").steps == 77
    runs = resolve_runs(command("--config.variants.dense.moe.num_experts=4", argument=":compare"))
    assert {name: run.moe.num_experts for name, run in runs.items()} == {"dense": 4, "moe": 8}


def test_help_has_the_usage_and_every_field(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse_command_line(["--help"], usage="Trains. example: python")
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith("Trains. example: python")
    for path, field in FIELDS.items():
        assert f"  {path}=" in out and field.help in out


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda c: c.update(steps=True), "config.steps: got"),
        (lambda c: c.model.update(widht=3), "config.model.widht: unknown .* config.model.width"),
        (lambda c: c.update(num_experts=3), "did you mean config.moe.num_experts"),
        (lambda c: c.__delattr__("seed"), "config.seed: missing"),
        (lambda c: c.__delattr__("router"), "config.router: missing"),
        (lambda c: c.optimizer.update(clip_norm=float("inf")), "clip_norm: got inf"),
    ],
)
def test_a_bad_config_file_is_refused(change, message):
    config = base_config()
    change(config)
    with pytest.raises(ConfigError, match=message):
        validate(config)


def test_differences_name_keys_and_both_values():
    config = base_config()
    [before] = resolve_runs(config).values()
    config.steps = 20
    config.router = "top_k_softmax"
    config.moe.capacity_factor = 1.5
    config.data.cache_dir = "/elsewhere"  # a place, not a property of the run
    [after] = resolve_runs(config).values()
    assert differences(before, before) == []
    assert sorted(differences(before, after)) == [
        "moe.capacity_factor: None -> 1.5",
        "router: softmax_top_k -> top_k_softmax",
        "routers.softmax_top_k.renormalize: false -> (none)",
        "steps: 300 -> 20",
    ]


def test_every_activation_is_elementwise_in_jax_nn():
    for name in config_module.ACTIVATIONS:
        function = getattr(jax.nn, name)
        required = [
            p for p in inspect.signature(function).parameters.values() if p.default is p.empty
        ]
        assert len(required) == 1, name
        both = function(jnp.array([-1.5, 0.5]))
        assert both[1] == function(jnp.array(0.5)), name


def test_the_names_of_the_data_are_those_of_the_data_package():
    from moe_jax.data.documents import DATASETS

    assert set(config_module.DATASETS) == set(DATASETS)


def test_a_run_config_as_written_is_readable():
    [run] = resolve_runs(base_config()).values()
    text = config_to_json(run)
    assert json.loads(text)["moe"]["num_experts"] == 8
    assert text.endswith("}\n") and '\n  "steps": 300' in text


ROUTER_ERRORS = [
    ("router=top_p routers.top_p.mass=2", "config.routers.top_p.mass: got 2.0; allowed: 0 <"),
    (
        "router=temperature_top_k routers.temperature_top_k.temperature=0",
        "config.routers.temperature_top_k.temperature: got 0.0; allowed: numbers > 0",
    ),
    (
        "router=smooth_top_k routers.smooth_top_k.max_active=1",
        "config.routers.smooth_top_k.max_active: got 1; allowed: 2..8",
    ),
    (
        "router=sigmoid_top_k routers.sigmoid_top_k.num_groups=3",
        "config.routers.sigmoid_top_k.num_groups: got 3; allowed: divisors of 8",
    ),
    (
        "router=relu_gate routers.relu_gate.max_active=2",
        "config.routers.relu_gate.max_active: got 2; allowed: 3..8",
    ),
    (
        "router=smear moe.allow_future_leak=true losses.load_balance_scope=sequence",
        "config.losses.load_balance_scope: got sequence; allowed: batch with router smear",
    ),
    ("router=sigmoid_top_k moe.expert_dropout=0.1", "allowed: 0 with router sigmoid_top_k"),
    (
        "router=smooth_top_k routers.smooth_top_k.b=0",
        "config.routers.smooth_top_k.b: got 0.0; allowed: numbers > 0",
    ),
    ("router=relu_gate routers.relu_gate.factor=1", "config.routers.relu_gate.factor: got 1.0;"),
    ("router=sinkhorn routers.sinkhorn.iterations=0", "config.routers.sinkhorn.iterations: got 0;"),
    (
        "router=smooth_top_k routers.smooth_top_k.max_active=few",
        "config.routers.smooth_top_k.max_active: got 'few'; allowed: whole numbers, or None",
    ),
    ("router=expert_choice", "config.router: got expert_choice; allowed: .*allow_future_leak=true"),
    ("router=smear", "config.router: got smear; allowed: .*allow_future_leak=true"),
    (
        "router=soft_moe moe.allow_future_leak=true moe.capacity_factor=1.0",
        "config.moe.capacity_factor: got 1.0; allowed: None with router soft_moe",
    ),
    ("router=noisy_top_k moe.k=1", "config.moe.k: got 1; allowed: 2 or more with router noisy"),
    (
        "router=sigmoid_top_k moe.k=1",
        "config.routers.sigmoid_top_k.renormalize: got true; allowed: false when moe.k is 1",
    ),
    (
        "router=hash losses.load_balance=0.1",
        "config.losses.load_balance: got 0.1; allowed: None or",
    ),
    ("router=hash moe.expert_dropout=0.1", "config.moe.expert_dropout: got 0.1; allowed: 0 with"),
    ("router=hash moe.input_jitter=0.1", "config.moe.input_jitter: got 0.1; allowed: 0 with"),
    ("router=base_assignment moe.expert_dropout=0.1", "allowed: 0 with router base_assignment"),
    ("routers.top_k.mass=1", "config.routers.top_k.mass: unknown field"),
]


@pytest.mark.parametrize("overrides, message", ROUTER_ERRORS)
def test_what_does_not_fit_a_router_is_refused(command, overrides, message):
    with pytest.raises(ConfigError, match=message):
        command(*(f"--config.{override}" for override in overrides.split()))


@pytest.mark.parametrize("name", sorted(ROUTERS))
def test_every_router_can_be_named_and_keeps_its_own_arguments_alone(command, name):
    overrides = [f"--config.router={name}"]
    if make_router(name, k=2).sees_future == "always":
        overrides.append("--config.moe.allow_future_leak=true")
    [run] = resolve_runs(command(*overrides)).values()
    assert run.routers.to_dict() == {name: default_arguments()[name]}
    assert make_method(run) == make_router(name, k=2, **default_arguments()[name])


def test_a_routers_optional_number(command):
    config = command("--config.router=smooth_top_k", "--config.routers.smooth_top_k.max_active=4")
    assert config.routers.smooth_top_k.max_active == 4
    config = command("--config.routers.smooth_top_k.max_active=None")
    assert config.routers.smooth_top_k.max_active is None


def test_weights_of_the_common_losses(command):
    def weights(*overrides):
        [run] = resolve_runs(command(*(f"--config.{o}" for o in overrides))).values()
        return make_weights(run)

    assert weights()[:2] == (0.01, 0.001)
    assert weights("losses.load_balance=0.5", "losses.z=0")[:2] == (0.5, 0)
    assert weights("router=relu_gate")[:2] == (0, 0)  # its L1 loss balances
    assert weights("router=relu_gate", "losses.load_balance=0.5")[0] == 0.5
    assert weights("router=hash")[:2] == (0, 0)
    assert weights("router=smooth_top_k").balance_choices == "first"
    assert weights("losses.load_balance_scope=sequence").balance_per_sequence
