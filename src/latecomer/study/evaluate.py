"""Evaluation of a server's models: on the central test set, and on each device's test part.

Test parts are used for scores only. Personalisation uses the training part of a device, early
stopping the validation parts (`tests/study/test_leak.py`).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from latecomer.core.messages import ServingSettings
from latecomer.core.server import Server
from latecomer.core.submodel import Submodel, name_of, take
from latecomer.data.federated_dataset import Examples
from latecomer.device.client import BUFFERS
from latecomer.device.flat import FlatModel
from latecomer.device.personalisation import personalise, subsample
from latecomer.study.experiment import Experiment
from latecomer.study.metrics import LocalScores, Scores, class_scores, confusion, over_devices
from latecomer.study.scoring import Parts

MAX_EXAMPLES_AT_ONCE = 4096  # in one forward pass
MAX_OUTPUTS_AT_ONCE = 2**24  # logits of tokens: 64 MB
MAX_MODELS_AT_ONCE = 16


class Evaluator:
    """Computes the scores of a server's models on the data of one experiment."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        # The tensors that a device keeps between its tasks; set by the run.
        self.memory_of: Callable[[int], Mapping[str, Tensor]] = lambda device: {}
        devices = range(len(experiment.federation.clients))
        self._tested = [d for d in devices if len(experiment.data.test_of(d).y)]
        self._trained = [d for d in devices if len(experiment.federation.clients[d].train.y)]

    @torch.no_grad()
    def central(self, server: Server, time: float = 0.0) -> Scores:
        """Scores on the central test set of virtual time `time`.

        Where there are several models, each counts by the number of devices assigned to it.
        """
        test = self.experiment.data.central_test(time)
        if max_examples := self.experiment.config.evaluate.examples:
            test = test.take(subsample(torch.arange(len(test.y)), test.y, max_examples)[0])
        return self._scores(server, test)

    @torch.no_grad()
    def validation(self, server: Server, time: float = 0.0) -> Scores:
        """The same on the union of the devices' validation parts."""
        return self._scores(server, self.experiment.data.validation(time))

    def _scores(self, server: Server, data: Examples) -> Scores:
        scoring, network = self.experiment.scoring, self.experiment.model
        members = Counter(server.lineage_of(device) for device in self._trained)
        models = [server.model(lineage) for lineage in members]
        if not scoring.objective.classifies or scoring.extra:
            each = (scoring.scores(_parts(network, model, data)) for model in models)
            return scoring.average(list(zip(each, members.values(), strict=True)))
        classes, loss = scoring.objective.outputs, 0.0
        counts = torch.zeros(classes, classes, dtype=torch.float64)
        for logits, devices in zip(self._each(models, data.x), members.values(), strict=True):
            counts += devices * confusion(data.y, logits.argmax(1), classes)
            loss += devices * scoring.objective.mean(logits, data.y).item()
        return class_scores(counts, loss / members.total(), scoring.late_classes)

    @torch.no_grad()
    def local_test(self, server: Server, time: float = 0.0) -> LocalScores:
        """Scores of each device's personalised model on the device's test part of that time."""
        groups: dict[tuple[str, str, int], list[int]] = {}
        alone = self.experiment.model.keeps_buffers  # devices have different models
        for device in self._tested:
            width = name_of(server.submodel_of(device))
            key = (server.lineage_of(device), width, device if alone else 0)
            groups.setdefault(key, []).append(device)
        scoring = self.experiment.scoring
        found: dict[int, Scores] = {}
        for (lineage, *_), devices in groups.items():
            tests = [self.experiment.data.test_of(device, time) for device in devices]
            submodel = server.submodel_of(devices[0])
            params = take(server.store.head_params(lineage), submodel)
            settings, network = server.serving_settings(lineage), self._network(submodel)
            params = network.extended(params, self.memory_of(devices[0]).get(BUFFERS))
            outputs = self._local_logits(network, params, settings, devices, tests, time)
            for device, test, logits in zip(devices, tests, outputs, strict=True):
                found[device] = scoring.scores([(logits, test.y)], count_loss=False)
        return over_devices(
            found,
            self.experiment.fleet.late,
            scoring.main,
            scoring.lower_is_better,
            scoring.local_further,
        )

    def _local_logits(
        self,
        network: FlatModel,
        params: Tensor,
        settings: ServingSettings,
        devices: Sequence[int],
        tests: Sequence[Examples],
        time: float,
    ) -> Iterator[Tensor]:
        """The logits of each device's personalised model on its test part.

        Without fine-tuning devices share one forward pass, unless outputs are as large as those
        for sequences of tokens.
        """
        alone = settings.finetune_epochs > 0 or network.objective.kind == "tokens"
        if not alone:
            logits = _logits(network, params, torch.cat([test.x for test in tests]))
            shared = torch.split(logits, [len(test.y) for test in tests])
        if settings == ServingSettings():
            yield from (_logits(network, params, test.x) for test in tests) if alone else shared
            return
        spec = self.experiment.strategy.prepare(self.experiment.spec)
        for i, (device, test) in enumerate(zip(devices, tests, strict=True)):
            train = self.experiment.data.train_of(device, time)
            model = personalise(network, params, settings, spec, train.x, train.y)
            logits = _logits(network, model.params, test.x) if alone else shared[i]
            yield logits + model.output_bias

    def _each(self, models: Sequence[Tensor], x: Tensor) -> Iterator[Tensor]:
        """The logits of every model on the same examples, several models per forward pass."""
        network = self.experiment.model
        if len(models) == 1 or self.experiment.resolution.batching_problem:
            yield from (_logits(network, model, x) for model in models)
            return
        several = torch.func.vmap(network.logits, in_dims=(0, None))
        for start in range(0, len(models), MAX_MODELS_AT_ONCE):
            stacked = torch.stack(list(models[start : start + MAX_MODELS_AT_ONCE]))
            batches = torch.split(x, MAX_EXAMPLES_AT_ONCE // MAX_MODELS_AT_ONCE)
            yield from torch.cat([several(stacked, batch) for batch in batches], dim=1)

    def _network(self, submodel: Submodel | None) -> FlatModel:
        return self.experiment.networks(submodel) or self.experiment.model


def _parts(network: FlatModel, params: Tensor, data: Examples) -> Parts:
    """The outputs of a model and the targets, batch by batch."""
    size = MAX_EXAMPLES_AT_ONCE
    if network.objective.kind == "tokens":
        size = max(1, min(size, MAX_OUTPUTS_AT_ONCE // (data.y[0].numel() * network.num_classes)))
    for index in torch.split(torch.arange(len(data.y)), size):
        x, y = data.take(index)
        yield network.logits(params, x), y


def _logits(network: FlatModel, params: Tensor, x: Tensor) -> Tensor:
    batches = torch.split(x, MAX_EXAMPLES_AT_ONCE)
    return torch.cat([network.logits(params, batch) for batch in batches])
