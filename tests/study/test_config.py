"""Configs: what `--set` understands, and that a resolved config is a config."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from latecomer.errors import BadInput
from latecomer.study.config import (
    Config,
    GammaDelay,
    load_config,
    merged,
    parse,
    quickstart,
    with_settings,
)
from latecomer.study.experiment import Experiment

MakeConfig = Callable[..., Config]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-0.5", -0.5),
        ("1e-3", 0.001),
        ("true", True),
        ("[64,16]", [64, 16]),
        ("[]", []),
        ("word", "word"),
        ("two words", "two words"),
        ("module:callable", "module:callable"),
        ("by-subject", "by-subject"),
        ('"3"', "3"),
        ("'a.b'", "a.b"),
        ("{gamma = 10}", {"gamma": 10}),
        ("", ""),
        (" 7 ", 7),
        ("a=b", "a=b"),
        ("../data/x.npz", "../data/x.npz"),
    ],
)
def test_set_takes_a_toml_value_or_a_bare_word(text: str, value: object) -> None:
    found = with_settings({}, [f"table.key={text}"])
    assert found == {"table": {"key": value}}
    assert type(found["table"]["key"]) is type(value)


def test_set_goes_deep_and_the_last_one_wins() -> None:
    tree = {"fleet": {"devices": 5, "late": {"delay": 1}}}
    found = with_settings(tree, ["fleet.late.delay=2", "fleet.late.delay=3", "seed=4"])
    assert found == {"seed": 4, "fleet": {"devices": 5, "late": {"delay": 3}}}
    assert tree == {"fleet": {"devices": 5, "late": {"delay": 1}}}


def test_set_reaches_the_config() -> None:
    changes = ["fleet.late.delay={gamma = 10}", "model.hidden=[64,16]", "strategy.alpha=0.5"]
    config = parse(with_settings(quickstart(), changes))
    assert config.fleet.late.delay == GammaDelay(gamma=10)
    assert config.model.hidden == (64, 16)
    assert config.strategy.options == {"alpha": 0.5}


def test_merged_replaces_values_and_keeps_the_rest_of_their_tables() -> None:
    tree = {"a": {"b": {"c": 1, "d": 2}, "e": 3}, "f": [1, 2]}
    found = merged(tree, {"a": {"b": {"c": 9}}, "f": [3], "g": {"h": 4}})
    assert found == {"a": {"b": {"c": 9, "d": 2}, "e": 3}, "f": [3], "g": {"h": 4}}
    assert tree["a"] == {"b": {"c": 1, "d": 2}, "e": 3}


def test_a_value_takes_the_place_of_a_table() -> None:
    assert merged({"delay": {"gamma": 3}}, {"delay": 5}) == {"delay": 5}
    assert merged({"delay": 5}, {"delay": {"gamma": 3}}) == {"delay": {"gamma": 3}}


def test_the_defaults_are_those_of_the_interface() -> None:
    config = parse({})
    assert (config.seed, config.fleet.devices, config.fleet.profile) == (1, 100, "uniform")
    assert (config.data.source, config.data.partition, config.data.alpha) == (
        "digits",
        "dirichlet",
        0.1,
    )
    assert (config.data.test, config.data.scale, config.data.augment) == ("fair", "global", "none")
    assert (config.fleet.late.kind, config.model.hidden) == ("in-flight", (64, 32))
    training = config.training
    assert (training.local_epochs, training.batch_size, training.lr) == (2, 32, 0.01)
    assert (training.momentum, training.optimizer, training.prox) == (0.5, "sgd", 0.0)
    assert config.privacy.epsilon == 0


def test_the_quickstart_parses_and_needs_no_file() -> None:
    config = parse(quickstart())
    assert config.data.source == "digits"
    assert config.data.path == ""
    assert config.stop.updates > 0


def test_a_config_does_not_change(tiny: MakeConfig) -> None:
    config = tiny()
    with pytest.raises(Exception, match="frozen"):
        config.seed = 5  # type: ignore[misc]


trees = st.fixed_dictionaries(
    {},
    optional={
        "seed": st.integers(0, 2**63 - 1),
        "data": st.fixed_dictionaries(
            {},
            optional={
                "path": st.sampled_from(["", "a b.npz", 'q"uote', "c:\\d\\e", "über\n\t'"]),
                "alpha": st.floats(1e-6, 1e6),
            },
        ),
        "fleet": st.fixed_dictionaries(
            {},
            optional={
                "devices": st.integers(1, 10**6),
                "up": st.floats(1e-3, float("inf")),
                "crash": st.floats(0, 1),
                "late": st.fixed_dictionaries(
                    {},
                    optional={
                        "classes": st.lists(st.integers(0, 9), max_size=3),
                        "delay": st.one_of(
                            st.integers(0, 50),
                            st.floats(0, 50),
                            st.fixed_dictionaries({"gamma": st.floats(0.1, 50)}),
                        ),
                    },
                ),
            },
        ),
        "model": st.fixed_dictionaries({"hidden": st.lists(st.integers(1, 99), max_size=3)}),
        "strategy": st.fixed_dictionaries({"name": st.just("fedbuff"), "size": st.integers(1, 9)}),
        "compare": st.just({"mine": {"strategy": {"name": "fedavg"}}}),
    },
)


@settings(deadline=None)
@given(trees)
def test_a_config_survives_its_file(tmp_path_factory: Any, tree: dict[str, Any]) -> None:
    config = parse(tree)
    path = tmp_path_factory.mktemp("config") / "config.toml"
    path.write_text(config.to_toml(), encoding="utf-8")
    assert load_config(path) == config
    assert parse(load_config(path).model_dump()) == config


def test_what_check_prints_is_a_fixed_point(tiny: MakeConfig, tmp_path: Path) -> None:
    """A resolved config resolves to itself, so that running it is the same run."""
    changes = ["stop.updates=0", "fleet.late.classes=[3]", "fleet.late.delay={gamma = 2}"]
    resolved = Experiment(tiny(*changes)).config
    path = tmp_path / "resolved.toml"
    path.write_text(resolved.to_toml(), encoding="utf-8")
    again = Experiment(load_config(path)).config
    assert again == resolved
    assert again.to_toml() == resolved.to_toml()
    assert resolved.stop.updates == 500
    assert resolved.evaluate.every == 10
    assert resolved.strategy.options["alpha"] == 0.6


def test_an_unknown_key_deep_down_is_named_in_full() -> None:
    with pytest.raises(BadInput, match=r"here: unknown key 'fleet.late.clases'; did you mean"):
        parse({"fleet": {"late": {"clases": [1]}}}, "here")


def test_an_error_says_the_place_in_a_list() -> None:
    with pytest.raises(BadInput, match=r"model.hidden.1 = 'wide'"):
        parse({"model": {"hidden": [8, "wide"]}})


def test_options_of_a_strategy_survive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(tomli_w.dumps({"strategy": {"name": "fedasync", "decay": "hinge", "b": 2}}))
    assert load_config(path, ["strategy.p=1.5"]).strategy.options == {
        "decay": "hinge",
        "b": 2,
        "p": 1.5,
    }


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("fleet.late.classes=3", "fleet.late.classes = 3: must be a list"),
        ("fleet.late.only=yes", "fleet.late.only = 'yes': must be true or false"),
        ("fleet.late.classes=['sit']", "fleet.late.classes.0 = 'sit': "),
        ("fleet.devices=true", "fleet.devices = True: must be an integer"),
    ],
)
def test_types_are_named_in_the_words_of_toml(setting: str, line: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse(with_settings({}, [setting]))
    assert line in str(caught.value)


@pytest.mark.parametrize(
    ("tree", "line"),
    [
        ({}, "--set 'training.lr=-1': training.lr = -1: must be greater than 0"),
        ({"training": {"lr": "x"}}, "--set 'training.lr=-1'"),
        ({"seed": "x"}, "file: seed = 'x': must be an integer"),
    ],
)
def test_a_slip_is_blamed_on_where_it_was_made(tree: dict[str, Any], line: str) -> None:
    settings = ["fleet.devices=5", "training.lr=0.1" if "seed" in tree else "training.lr=-1"]
    with pytest.raises(BadInput) as caught:
        parse(with_settings(tree, settings), "file")
    assert str(caught.value).startswith(line)


def test_an_unknown_key_of_a_setting_is_named_with_it() -> None:
    with pytest.raises(BadInput, match=r"^--set 'training.lrr=1': unknown key .* mean 'lr'"):
        with_settings({}, ["training.lrr=1"])
