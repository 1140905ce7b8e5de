"""The Python interface: `run`, `compare` and `advise`."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from latecomer.device.objective import LossFunction
from latecomer.device.own_training import TrainFunction
from latecomer.errors import BadInput
from latecomer.study.advice.advice import Advice, scenario, subject
from latecomer.study.advice.advice import advise as advise_on
from latecomer.study.compare import AnyStrategy, resume_comparison
from latecomer.study.compare import compare as compare_all
from latecomer.study.config import APP_DEVICES, Tree, merged, parse, quickstart, read_toml
from latecomer.study.experiment import Experiment
from latecomer.study.files import numbered_folder
from latecomer.study.given import Given
from latecomer.study.metrics import Metric
from latecomer.study.report import write_report
from latecomer.study.results import Comparison, Result
from latecomer.study.runner import Silent, resume_run, start_run

ConfigLike = Mapping[str, Any] | str | Path | None


class _Logged(Silent):
    """Notes and warnings of a run go to the logger `latecomer`, which prints them by default."""

    def started(self, experiment: Experiment, folder: Path) -> None:
        for note in experiment.notes:
            _log_note(note)

    def warned(self, text: str) -> None:
        logging.getLogger("latecomer").warning(text)


def _log_note(note: str) -> None:
    logging.getLogger("latecomer").warning("note: %s", note)


def run(
    config: ConfigLike = None,
    out: str | Path | None = None,
    strategy: AnyStrategy | str | None = None,
    *,
    loss: LossFunction | str | None = None,
    metrics: Mapping[str, Metric] | Sequence[str] | None = None,
    data: object = None,
    resume: str | Path | None = None,
    model: nn.Module | Callable[..., nn.Module] | str | None = None,
    train: TrainFunction | str | None = None,
    client_app: object = None,
    server_app: object = None,
    initial_arrays: object = None,
) -> Result:
    """Run one experiment in a new folder `out`, or continue the one in the folder `resume`.

    Without `out` the folder is `runs/run-N` with the first N that is free.

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

    `client_app` is a Flower `ClientApp`, or the folder of a Flower app, whose unchanged train and
    evaluate functions then run on the devices (docs/flower.md), in place of data, model and
    training. A `ClientApp` needs `server_app`, which is run up to its first message, or
    `initial_arrays`: an `ArrayRecord`, a state_dict, or a dict or list of arrays.
    """
    named, given = _named_and_given(loss, metrics, data, model, train)
    if isinstance(client_app, str | Path):
        named, client_app = merged(named, {"app": {"path": str(client_app)}}), None
    given = replace(
        given, client_app=client_app, server_app=server_app, initial_arrays=initial_arrays
    )
    if config is None and resume is None and (client_app is not None or "app" in named):
        config = {"fleet": {"devices": APP_DEVICES}}
    if isinstance(strategy, str):
        named, strategy = merged(named, {"strategy": {"name": strategy}}), None
    if resume is not None:
        _check_resume(config, bool(named))
        folder = Path(resume)
        resume_run(folder, _Logged(), strategy, given)
    else:
        folder = numbered_folder(Path("runs"), "run") if out is None else Path(out)
        start_run(parse(merged(_tree(config), named)), folder, _Logged(), strategy, given)
    write_report(folder)
    return Result(folder)


def compare(
    config: ConfigLike = None,
    strategies: Sequence[str] | Mapping[str, AnyStrategy | str] = (),
    seeds: Sequence[int] = (1, 2, 3),
    out: str | Path = "comparison",
    jobs: int = 1,
    *,
    loss: LossFunction | str | None = None,
    metrics: Mapping[str, Metric] | Sequence[str] | None = None,
    data: object = None,
    resume: str | Path | None = None,
    model: nn.Module | Callable[..., nn.Module] | str | None = None,
    train: TrainFunction | str | None = None,
) -> Comparison:
    """Run the same scenario under several strategies and seeds, in a new folder `out`.

    `strategies` are names, or {label: strategy} with the strategies that `run` takes. `loss`,
    `metrics`, `data`, `model` and `train` are as for `run`, the same for all runs. With `jobs` > 1
    runs are computed in so many processes, to which these objects are copied: their functions must
    be in modules. `resume` continues the comparison in that folder; give the same objects again.
    """
    for name, value in {"strategies": strategies, "seeds": seeds}.items():
        if isinstance(value, str) or not isinstance(value, Sequence | Mapping | range):
            raise BadInput(f"{name}: {value!r} is no list; allowed is one, such as [{value!r}]")
    named, given = _named_and_given(loss, metrics, data, model, train)
    objects: dict[str, AnyStrategy] = {}
    if isinstance(strategies, Mapping):
        for label, strategy in strategies.items():
            if isinstance(strategy, str):
                named = merged(named, {"compare": {label: {"strategy": {"name": strategy}}}})
            else:
                objects[label] = strategy
    if resume is not None:
        _check_resume(config, bool(named or (strategies and not objects)))
        folder = Path(resume)
        resume_comparison(folder, jobs, given=given, objects=objects)
    else:
        tree, folder = merged(_tree(config), named), Path(out)
        names = list(strategies)
        compare_all(
            tree, names, seeds, folder, jobs, on_note=_log_note, given=given, objects=objects
        )
    write_report(folder)
    return Comparison(folder)


def advise(what: ConfigLike = None) -> Advice:
    """The problems of a scenario or a finished run, and which strategies to compare.

    `what` is a config as for `run`, or the folder of a run or comparison. `findings` have their
    measured effects, the largest first; each of `suggestions` has a `table` to take as the
    config's `strategy`.
    """
    if isinstance(what, Mapping):
        return advise_on(scenario(what, "config", "latecomer run CONFIG.toml"))
    return advise_on(subject(None if what is None else Path(what)))


def _named_and_given(
    loss: LossFunction | str | None,
    metrics: Mapping[str, Metric] | Sequence[str] | None,
    data: object,
    model: nn.Module | Callable[..., nn.Module] | str | None,
    train: TrainFunction | str | None,
) -> tuple[Tree, Given]:
    """The arguments that are names, as a part of a config, and those that are objects."""
    tree: Tree = {}
    if isinstance(loss, str):
        tree, loss = merged(tree, {"objective": {"loss": loss}}), None
    if isinstance(metrics, Sequence):
        if any(callable(each) for each in metrics):
            raise BadInput(
                "metrics: a list with a function; allowed are names, or {name: function}"
            )
        names = [metrics] if isinstance(metrics, str) else list(metrics)
        tree, metrics = merged(tree, {"objective": {"metrics": names}}), None
    if isinstance(model, str):
        tree, model = merged(tree, {"model": {"name": model}}), None
    if isinstance(train, str):
        tree, train = merged(tree, {"training": {"function": train}}), None
    return tree, Given(loss, {} if metrics is None else metrics, data, model, train)


def _check_resume(config: ConfigLike, has_names: bool) -> None:
    """BadInput if something is given that the folder of the run has."""
    if config is not None:
        raise BadInput("resume= takes no config: the run's folder has it")
    if has_names:
        raise BadInput("resume= takes no names: the run's folder has them")


def _tree(config: ConfigLike) -> Tree:
    if config is None:
        return quickstart()
    if isinstance(config, Mapping):
        return dict(config)
    if not isinstance(config, str | Path):
        kind = type(config).__name__
        raise BadInput(f"config: a {kind}; allowed are a TOML file, nested dicts, or nothing")
    return read_toml(Path(config))
