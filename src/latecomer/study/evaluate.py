"""Evaluation: the model that each device would use, on central and on the devices' own data."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from latecomer.core.server import Server
from latecomer.core.strategy import Personalises
from latecomer.core.submodel import Submodel, name_of, take
from latecomer.data.federated_dataset import Examples
from latecomer.device.personalisation import (
    interpolated_params,
    prior_correction,
    some_of,
    training_errors,
)
from latecomer.study.experiment import Experiment
from latecomer.study.metrics import Scores, confusion, scores

BATCH = 4096
MODELS_AT_ONCE = 16


@dataclass(frozen=True)
class OverDevices:
    """One measure over all devices."""

    mean: float | None
    worst: float | None


@dataclass(frozen=True)
class ClientAccuracy:
    """Accuracy over devices, each on its own held-back data with the model it would use."""

    mean: float | None
    worst: float | None
    late_mean: float | None
    balanced: OverDevices
    macro_f1: OverDevices
    worst_device: int | None
    each: Mapping[int, float]


class Evaluator:
    """Measures the models of a server as an experiment's devices would use them."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        clients = range(len(experiment.federation.clients))
        self._measured = [d for d in clients if len(experiment.test_of(d).y)]
        self._users = [d for d in clients if len(experiment.federation.clients[d].train.y)]

    @torch.no_grad()
    def central(self, server: Server, time: float = 0.0) -> Scores:
        """On the central test set of that time, averaged over devices with different models."""
        test = _some(self.experiment.central_test(time), self.experiment.config.evaluate.examples)
        return self._measure(server, test)

    @torch.no_grad()
    def validation(self, server: Server, time: float = 0.0) -> Scores:
        """The same on the validation parts of all devices."""
        return self._measure(server, self.experiment.validation(time))

    def _measure(self, server: Server, test: Examples) -> Scores:
        classes = self.experiment.federation.num_classes
        members = Counter(server.home(device) for device in self._users)
        counts, loss = torch.zeros(classes, classes, dtype=torch.float64), 0.0
        models = [server.model(lineage) for lineage in members]
        for logits, share in zip(self._each(models, test.x), members.values(), strict=True):
            counts += share * confusion(test.y, logits.argmax(1), classes)
            loss += share * F.cross_entropy(logits, test.y).item()
        return scores(counts, loss / members.total(), self.experiment.config.fleet.late.classes)

    @torch.no_grad()
    def on_devices(self, server: Server, time: float = 0.0) -> ClientAccuracy:
        """On every device's own held-back data: one forward pass per model, not per device.

        A model on which devices put changes of their own is another one on each.
        """
        groups: dict[tuple[str, str], list[int]] = {}
        for device in self._measured:
            key = (server.home(device), name_of(server.carries(device)))
            groups.setdefault(key, []).append(device)
        classes = self.experiment.federation.num_classes
        found: dict[int, Scores] = {}
        for (lineage, _), devices in groups.items():
            parts = [self.experiment.test_of(d, time) for d in devices]
            submodel = server.carries(devices[0])
            params = take(server.model_on_devices(lineage), submodel)
            outputs = self._outputs(server.strategy.own, params, submodel, devices, parts, time)
            for device, part, logits in zip(devices, parts, outputs, strict=True):
                found[device] = scores(confusion(part.y, logits.argmax(1), classes), 0.0)
        accuracy = {device: each.accuracy for device, each in found.items()}
        late = [accuracy[d] for d in self.experiment.fleet.late if d in accuracy]
        return ClientAccuracy(
            mean=_mean(accuracy.values()),
            worst=min(accuracy.values(), default=None),
            late_mean=_mean(late),
            balanced=_over([each.balanced_accuracy for each in found.values()]),
            macro_f1=_over([each.macro_f1 for each in found.values()]),
            worst_device=min(accuracy, key=lambda d: accuracy[d], default=None),
            each=accuracy,
        )

    def _outputs(
        self,
        own: Personalises | None,
        params: Tensor,
        submodel: Submodel | None,
        devices: Sequence[int],
        parts: Sequence[Examples],
        time: float,
    ) -> Iterator[Tensor]:
        """The outputs of what each device makes of this model, on its held-back data."""
        if own is None or not own.keep:
            logits = self._logits(params, torch.cat([part.x for part in parts]), submodel)
            shared = torch.split(logits, [len(part.y) for part in parts])
        if own is None or not (own.keep or own.mix):
            yield from shared
            return

        def outputs(params: Tensor, x: Tensor) -> Tensor:
            return self._logits(params, x, submodel)

        classes = self.experiment.federation.num_classes
        expected = own.expected(devices, classes)
        for i, (device, part) in enumerate(zip(devices, parts, strict=True)):
            train = self.experiment.train_of(device, time)
            offset = prior_correction(train.y, classes, own.mix, expected)
            if own.keep:
                errors = training_errors(outputs, train.x, train.y, offset)
                kept = interpolated_params(params, own.change(device), own.keep, errors)
                yield outputs(kept, part.x) + offset
            else:
                yield shared[i] + offset

    def _each(self, models: Sequence[Tensor], x: Tensor) -> Iterator[Tensor]:
        """The output of every model on the same data, several models at a time."""
        if len(models) == 1 or self.experiment.vmap_trouble:
            yield from (self._logits(model, x) for model in models)
            return
        several = torch.func.vmap(self.experiment.model.logits, in_dims=(0, None))
        for start in range(0, len(models), MODELS_AT_ONCE):
            stacked = torch.stack(list(models[start : start + MODELS_AT_ONCE]))
            outputs = [several(stacked, batch) for batch in torch.split(x, BATCH // MODELS_AT_ONCE)]
            yield from torch.cat(outputs, dim=1)

    def _logits(self, params: Tensor, x: Tensor, submodel: Submodel | None = None) -> Tensor:
        network = self.experiment.networks(submodel) or self.experiment.model
        return torch.cat([network.logits(params, batch) for batch in torch.split(x, BATCH)])


def _some(test: Examples, most: int) -> Examples:
    """At most so many of the test examples (0: all), always the same ones."""
    return Examples(*some_of(test.x, test.y, most)) if most else test


def _over(values: Sequence[float]) -> OverDevices:
    return OverDevices(_mean(values), min(values, default=None))


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return sum(listed) / len(listed) if listed else None
