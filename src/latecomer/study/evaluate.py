"""Evaluation: the model that each device would use, on central and on the devices' own data."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from latecomer.core.server import Server
from latecomer.data.federation import Examples
from latecomer.study.experiment import Experiment
from latecomer.study.metrics import Scores, confusion, scores

BATCH = 4096
MODELS_AT_ONCE = 16


@dataclass(frozen=True)
class ClientAccuracy:
    """Accuracy over devices, each on its own held-back data with the model it would use."""

    mean: float | None
    worst: float | None
    late_mean: float | None
    each: Mapping[int, float]


class Evaluator:
    """Measures the models of a server as an experiment's devices would use them."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        clients = range(len(experiment.federation.clients))
        self._measured = [d for d in clients if len(experiment.test_of(d).y)]
        self._test = _some(experiment.federation.test, experiment.config.evaluate.examples)
        self._users = [d for d in clients if len(experiment.federation.clients[d].train.y)]

    @torch.no_grad()
    def central(self, server: Server) -> Scores:
        """On the central test set, averaged over the devices if they use different models."""
        test, classes = self._test, self.experiment.federation.num_classes
        members = Counter(server.home(device) for device in self._users)
        counts, loss = torch.zeros(classes, classes, dtype=torch.float64), 0.0
        models = [server.store.head_params(lineage) for lineage in members]
        for logits, share in zip(self._each(models, test.x), members.values(), strict=True):
            counts += share * confusion(test.y, logits.argmax(1), classes)
            loss += share * F.cross_entropy(logits, test.y).item()
        return scores(counts, loss / members.total(), self.experiment.config.fleet.late.classes)

    @torch.no_grad()
    def on_devices(self, server: Server) -> ClientAccuracy:
        """On every device's own held-back data: one forward pass per model, not per device."""
        by_lineage: dict[str, list[int]] = {}
        for device in self._measured:
            by_lineage.setdefault(server.home(device), []).append(device)
        found: dict[int, float] = {}
        for lineage, devices in by_lineage.items():
            parts = [self.experiment.test_of(d) for d in devices]
            logits = self._logits(
                server.store.head_params(lineage), torch.cat([p.x for p in parts])
            )
            right = (logits.argmax(1) == torch.cat([p.y for p in parts])).float()
            pieces = torch.split(right, [len(p.y) for p in parts])
            found.update({d: piece.mean().item() for d, piece in zip(devices, pieces, strict=True)})
        late = [found[d] for d in self.experiment.fleet.late if d in found]
        worst = min(found.values(), default=None)
        return ClientAccuracy(_mean(found.values()), worst, _mean(late), found)

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

    def _logits(self, params: Tensor, x: Tensor) -> Tensor:
        batches = torch.split(x, BATCH)
        return torch.cat([self.experiment.model.logits(params, batch) for batch in batches])


def _some(test: Examples, most: int) -> Examples:
    """At most so many of the test examples (0: all), always the same ones."""
    if not 0 < most < len(test.y):
        return test
    chosen = torch.randperm(len(test.y), generator=torch.Generator().manual_seed(0))[:most]
    return Examples(test.x[chosen], test.y[chosen])


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return sum(listed) / len(listed) if listed else None
