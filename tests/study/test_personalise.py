"""The section [personalise]: with any strategy, it changes local test accuracy and nothing else."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from latecomer.engines.virtual import Bounds
from latecomer.errors import BadInput
from latecomer.study.config import Config
from latecomer.study.experiment import Experiment
from latecomer.study.runner import start_run

MakeConfig = Callable[..., Config]
Results = tuple[dict[str, Any], list[dict[str, Any]]]

STRATEGIES = ("fedavg", "fedbuff", "echopfl", "latecomer")
PARTS = {
    "prior": ["personalise.prior=true"],
    "fine-tuning": ["personalise.finetune_epochs=2"],
    "both": ["personalise.prior=true", "personalise.finetune_epochs=2"],
}
SKEWED = ["data.alpha=0.1", "fleet.profile=tiers", "stop.updates=100", "evaluate.clients=true"]
SKEWED += ["evaluate.every=50"]  # fine-tuning on all devices takes most of the time
OFF = ["personalise.prior=false", "personalise.finetune_epochs=0"]


@pytest.fixture(scope="module")
def result(tiny: MakeConfig, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Results]:
    """Summary and events of a run with these settings; each is made once."""

    @cache
    def make(strategy: str, *settings: str) -> Results:
        folder = tmp_path_factory.mktemp("run") / "run"
        summary = start_run(tiny(f"strategy.name={strategy}", *SKEWED, *settings), folder)
        return summary, [json.loads(line) for line in (folder / "events.jsonl").open()]

    return make


def unscored(summary: dict[str, Any]) -> dict[str, Any]:
    """The summary without wall time and without scores on local test parts."""
    local = ("client_", "worst_client", "wall_seconds")
    return {name: value for name, value in summary.items() if not name.startswith(local)}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_only_local_test_accuracy_changes(
    result: Callable[..., Results], strategy: str, part: str
) -> None:
    plain, events = result(strategy)
    found, personalised_events = result(strategy, *PARTS[part])
    assert found["model_hash"] == plain["model_hash"]
    assert unscored(found) == unscored(plain)
    assert personalised_events == events
    assert found["client_accuracy"] != plain["client_accuracy"]
    # One or two classes per device: a model that knows this is right more often.
    assert found["client_accuracy"]["mean"] > plain["client_accuracy"]["mean"]


def test_switched_off_it_is_as_if_it_was_not_there(result: Callable[..., Results]) -> None:
    plain, events = result("latecomer")
    found, same = result("latecomer", *OFF)
    assert {**found, "wall_seconds": 0} == {**plain, "wall_seconds": 0}
    assert same == events


@pytest.mark.parametrize("epsilon", ["0", "20.0"])
def test_private_devices_report_no_class_shares(tiny: MakeConfig, epsilon: str) -> None:
    """Their corrections are relative to a uniform class prior."""
    config = tiny("personalise.prior=true", f"privacy.epsilon={epsilon}")
    experiment = Experiment(config)
    assert experiment.strategy.prepare(experiment.spec).report_shares
    server = experiment.server()
    experiment.engine(server).run(Bounds(updates=30), lambda: True)
    settings = server.serving_settings("main")
    assert settings.prior
    assert bool(settings.class_prior) == (epsilon == "0")


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("personalise.finetune_epochs=-1", "personalise.finetune_epochs.*0"),
        ("personalise.finetune_epochs=101", "personalise.finetune_epochs.*100"),
        ("personalise.finetune_epochs=1.5", "personalise.finetune_epochs"),
        ("personalise.prior=often", "personalise.prior"),
        ("personalise.interpolation=0.5", "personalise.*interpolation"),
        ("strategy.personalise=true", r"personalise\.prior"),
        ("strategy.advanced.samples=4", "advanced"),
    ],
)
def test_bad_values_give_one_line(tiny: MakeConfig, setting: str, reason: str) -> None:
    with pytest.raises(BadInput, match=reason) as error:
        Experiment(tiny("strategy.name=latecomer", setting))
    assert "\n" not in str(error.value)


def test_the_settings_are_in_the_folder_of_the_run(start: Callable[..., Any]) -> None:
    folder: Path
    folder, _ = start(*PARTS["both"], "stop.updates=10")
    assert "[personalise]\nprior = true\nfinetune_epochs = 2\n" in (
        folder / "config.toml"
    ).read_text(encoding="utf-8")
