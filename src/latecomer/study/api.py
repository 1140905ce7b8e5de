"""The Python interface: `run`, `compare` and `advise`."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from latecomer.core.strategy import Strategy
from latecomer.device.objective import LossFunction
from latecomer.device.own_training import TrainFunction
from latecomer.errors import BadInput
from latecomer.strategies.parts.flower_rounds import FlowerStrategy
from latecomer.strategies.recipe import Build
from latecomer.study.advice.advice import Advice, scenario, subject
from latecomer.study.advice.advice import advise as advise_on
from latecomer.study.compare import compare as compare_all
from latecomer.study.config import Tree, merged, parse, quickstart, read_toml
from latecomer.study.given import Given
from latecomer.study.metrics import Metric
from latecomer.study.results import Comparison, Result
from latecomer.study.runner import Silent, resume_run, start_run

ConfigLike = Mapping[str, Any] | str | Path | None


class _Logged(Silent):
    """Warnings of a run go to the logger `latecomer`, which prints them unless configured."""

    def warned(self, text: str) -> None:
        logging.getLogger("latecomer").warning(text)


def run(
    config: ConfigLike = None,
    out: str | Path = "run",
    strategy: Strategy | FlowerStrategy | Build | str | None = None,
    *,
    loss: LossFunction | str | None = None,
    metrics: Mapping[str, Metric] | Sequence[str] | None = None,
    data: object = None,
    resume: str | Path | None = None,
    model: nn.Module | Callable[..., nn.Module] | str | None = None,
    train: TrainFunction | str | None = None,
) -> Result:
    """Run one experiment in a new folder `out`, or continue the one in the folder `resume`.

    `config` is a TOML file or the same as nested dicts (None: the quickstart). `strategy` replaces
    the one that the config names: a name, a `Strategy` built from parts, a function that makes one,
    or an object of `flwr.serverapp.strategy`, whose rounds then run in virtual time on this fleet.
    A `Strategy` can be used for any number of runs: each works on its own copy.

    `loss` is a name of `objective.loss`, or a function of outputs and targets that gives a tensor:
    one value per example, or their mean. `metrics` are names, or {name: function} with functions of
    outputs and targets that give a number.

    `model` is a name of `model.name`, an `nn.Module`, whose weights are the initial model and which
    is not changed, or a callable that makes one. `train` is your own local training, a function
    train(model, dataset, context) that changes the model in place and returns the number of
    examples, or a dict of it (`num_examples`) and metrics, or nothing (`TrainContext`).

    `data` is one dataset, which `[data]` partitions over devices, or a list with one per device: a
    pair (x, y) of arrays or tensors, a map-style torch `Dataset`, a pandas frame (with the columns
    `data.target` and `data.subject`) or a dataset of the package `datasets`. With {"train": ...,
    "test": ...} the test set is central. To resume a run, give the same objects again.
    """
    if resume is not None:
        if config is not None:
            raise BadInput("resume= takes no config: the run's folder has it")
        if isinstance(strategy, str) or isinstance(loss, str) or isinstance(metrics, Sequence):
            raise BadInput("resume= takes no names: the run's folder has them")
        if isinstance(model, str) or isinstance(train, str):
            raise BadInput("resume= takes no names: the run's folder has them")
        given = Given(loss, {} if metrics is None else metrics, data, model, train)
        resume_run(Path(resume), _Logged(), strategy, given)
        return Result(Path(resume))
    tree = _tree(config)
    if isinstance(loss, str):
        tree, loss = _with_objective(tree, "loss", loss), None
    if isinstance(metrics, Sequence):
        named = [metrics] if isinstance(metrics, str) else list(metrics)
        tree, metrics = _with_objective(tree, "metrics", named), None
    if isinstance(model, str):
        tree, model = merged(tree, {"model": {"name": model}}), None
    if isinstance(train, str):
        tree, train = merged(tree, {"training": {"function": train}}), None
    if isinstance(strategy, str):
        tree, strategy = {**tree, "strategy": {**tree.get("strategy", {}), "name": strategy}}, None
    given = Given(loss, {} if metrics is None else metrics, data, model, train)
    start_run(parse(tree), Path(out), _Logged(), strategy, given)
    return Result(Path(out))


def compare(
    config: ConfigLike,
    strategies: Sequence[str],
    seeds: Sequence[int] = (1, 2, 3),
    out: str | Path = "comparison",
    jobs: int = 1,
) -> Comparison:
    """Run the same scenario under several strategies and seeds, in a new folder `out`."""
    compare_all(_tree(config), strategies, seeds, Path(out), jobs)
    return Comparison(Path(out))


def advise(what: ConfigLike = None) -> Advice:
    """The problems of a scenario or a finished run, and which strategies to compare.

    `what` is a config as for `run`, or the folder of a run or comparison. `findings` have their
    measured effects, the largest first; each of `suggestions` has a `table` to take as the
    config's `strategy`.
    """
    if isinstance(what, Mapping):
        return advise_on(scenario(what, "config", "latecomer run CONFIG.toml"))
    return advise_on(subject(None if what is None else Path(what)))


def _with_objective(tree: Tree, key: str, value: Any) -> Tree:
    return merged(tree, {"objective": {key: value}})


def _tree(config: ConfigLike) -> Tree:
    if config is None:
        return quickstart()
    return dict(config) if isinstance(config, Mapping) else read_toml(Path(config))
