import json

import pytest

from moe_jax.config import ConfigError, base_config, config_from_json, config_to_json, resolve_runs
from moe_jax.train.workdir import prepare_workdir, trained_by_one


def with_variants(*names):
    config = base_config()
    config.variants = {name: {"seed": i} for i, name in enumerate(names)}
    return config


def test_a_single_run_lives_in_the_workdir(tmp_path):
    workdir = tmp_path / "a" / "b"
    [(directory, run)] = prepare_workdir(workdir, base_config()).items()
    assert directory == workdir
    assert config_from_json((workdir / "config.json").read_text()) == run
    assert prepare_workdir(workdir, base_config()) == {workdir: run}
    assert [path.name for path in workdir.iterdir()] == ["config.json"]


def test_each_variant_has_a_folder(tmp_path):
    config = with_variants("one", "two")
    runs = prepare_workdir(tmp_path, config)
    assert [directory.name for directory in runs] == ["one", "two"]
    assert config_from_json((tmp_path / "config.json").read_text()) == config_from_json(
        config_to_json(config)
    )
    for directory, run in runs.items():
        stored = json.loads((directory / "config.json").read_text())
        assert "variants" not in stored and stored["seed"] == run.seed


def test_variants_can_be_added_but_not_taken_away(tmp_path):
    prepare_workdir(tmp_path, with_variants("one"))
    assert len(prepare_workdir(tmp_path, with_variants("one", "two"))) == 2
    with pytest.raises(ConfigError, match="has a variant 'two', and this config has not"):
        prepare_workdir(tmp_path, with_variants("one"))
    with pytest.raises(ConfigError, match="has a variant 'one', and this config has not"):
        prepare_workdir(tmp_path, base_config())


def test_another_config_is_refused_with_the_keys_and_both_values(tmp_path):
    prepare_workdir(tmp_path, base_config())
    before = (tmp_path / "config.json").read_text()
    config = base_config()
    config.steps = 20
    config.moe.capacity_factor = 1.5
    with pytest.raises(ConfigError) as caught:
        prepare_workdir(tmp_path, config)
    message = str(caught.value)
    assert "(moe.capacity_factor: None -> 1.5; steps: 300 -> 20)" in message
    assert str(tmp_path) in message and "\n" not in message
    assert (tmp_path / "config.json").read_text() == before
    with pytest.raises(ConfigError, match="has a run without variants"):
        prepare_workdir(tmp_path, with_variants("one"))


def test_a_changed_variant_is_refused(tmp_path):
    prepare_workdir(tmp_path, with_variants("one", "two"))
    config = with_variants("one", "two")
    config.variants.two.seed = 7
    with pytest.raises(ConfigError, match=r"two was made with another config \(seed: 1 -> 7\)"):
        prepare_workdir(tmp_path, config)


def test_the_place_of_the_data_may_change(tmp_path):
    prepare_workdir(tmp_path, base_config())
    config = base_config()
    config.data.cache_dir = "/elsewhere"
    [run] = prepare_workdir(tmp_path, config).values()
    assert run == resolve_runs(config)[""]


def test_a_place_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("")
    for place in ("file", "file/below"):
        with pytest.raises(ConfigError, match=f"--workdir: got '{tmp_path / place}': "):
            prepare_workdir(tmp_path / place, base_config())
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="config.json: .*not JSON"):
        prepare_workdir(tmp_path, base_config())


def test_checkpoints_without_a_config_are_nobodys(tmp_path):
    (tmp_path / "checkpoints" / "40").mkdir(parents=True)
    with pytest.raises(ConfigError, match="has checkpoints but no config.json"):
        prepare_workdir(tmp_path, base_config())


def test_checkpoints_that_are_a_file_are_found_at_the_start(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(ConfigError, match="is a file; allowed: a directory"):
        prepare_workdir(tmp_path, base_config())


def test_a_config_that_is_no_text_is_named(tmp_path):
    (tmp_path / "config.json").write_bytes(b"\xff\xff")
    with pytest.raises(ConfigError, match="config.json"):
        prepare_workdir(tmp_path, base_config())


def test_a_directory_is_trained_in_by_one_process(tmp_path):
    with trained_by_one(tmp_path), pytest.raises(ConfigError, match="another process trains in"):
        with trained_by_one(tmp_path):
            pass
    with trained_by_one(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_a_process_that_does_not_write_wants_the_workdir_of_the_one_that_does(tmp_path):
    with pytest.raises(ConfigError, match="allowed: a directory that all processes see"):
        prepare_workdir(tmp_path, base_config(), write=False)
    runs = prepare_workdir(tmp_path, base_config())
    assert prepare_workdir(tmp_path, base_config(), write=False) == runs
