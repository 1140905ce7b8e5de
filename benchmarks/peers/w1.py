"""Workload W1, shared by every peer script: data, model, settings and the meter.

Needs numpy and torch only, so it runs inside each peer's own environment.
"""

import json
import os
import resource
import time

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

DEVICES = 100
EXAMPLES = 80
FEATURES = 561
CLASSES = 6
EPOCHS = 2
BATCH = 32
LR = 0.01
MOMENTUM = 0.9


def make_w1(seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One (x, y) pair per device: class centres plus noise, skewed labels."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(CLASSES, FEATURES)).astype(np.float32)
    data = []
    for _ in range(DEVICES):
        y = rng.choice(CLASSES, size=EXAMPLES, p=rng.dirichlet(np.ones(CLASSES)))
        x = 0.15 * centres[y] + rng.normal(size=(EXAMPLES, FEATURES)).astype(np.float32)
        # One label in five is drawn anew, so that the gradients do not die away.
        y = np.where(rng.random(EXAMPLES) < 0.2, rng.integers(CLASSES, size=EXAMPLES), y)
        data.append((torch.from_numpy(x), torch.from_numpy(y.astype(np.int64))))
    return data


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, CLASSES)
    )


def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    """The local training of W1 as a plain eager loop; batches are cut from tensors."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    loss_fn = nn.CrossEntropyLoss()
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(y)).split(BATCH):
            optimizer.zero_grad()
            loss_fn(model(x[rows]), y[rows]).backward()
            optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, data: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Share of right answers over all devices: shows that the run did train."""
    hits = sum(int((model(x).argmax(1) == y).sum()) for x, y in data)
    return hits / (DEVICES * EXAMPLES)


def cpu_seconds() -> float:
    """User and system time of this process, its threads and its ended children."""
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        used = resource.getrusage(who)
        total += used.ru_utime + used.ru_stime
    return total


class Meter:
    """Counts client updates; the clock starts once `warmup` of them have passed."""

    def __init__(self, warmup: int, updates: int, cpu=cpu_seconds):
        self.warmup, self.wanted, self.cpu = warmup, updates, cpu
        self.seen = self.first = 0
        self.start = self.stop = None

    def add(self, count: int = 1) -> None:
        if self.done:
            return
        self.seen += count
        if self.start is None:
            if self.seen >= self.warmup:
                self.first = self.seen
                self.start = (self.cpu(), time.perf_counter())
        elif self.seen - self.first >= self.wanted:
            self.stop = (self.cpu(), time.perf_counter())

    @property
    def done(self) -> bool:
        return self.stop is not None

    def report(self, peer: str, version: str, note: str) -> None:
        """Print the result as one JSON line, the last line of every script."""
        updates = self.seen - self.first
        cpu, wall = (b - a for a, b in zip(self.start, self.stop, strict=True))
        result = {
            "peer": peer,
            "version": version,
            "updates": updates,
            "cpu_seconds": round(cpu, 3),
            "wall_seconds": round(wall, 3),
            "updates_per_cpu_second": round(updates / cpu, 1),
            "updates_per_wall_second": round(updates / wall, 1),
            "note": note,
        }
        print(json.dumps(result), flush=True)
