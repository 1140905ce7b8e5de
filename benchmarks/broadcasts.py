"""Trains the predictor of EchoPFL's broadcasts on recorded states, and prints its accuracy.

python benchmarks/broadcasts.py [--states 1200] [--out PATH]

Simulated runs in which Eq. 4 itself decides give states (the last changes of a cluster's model, and
its change since the last broadcast) with the decision that follows as label. Three quarters train
the network, a quarter tests it. Without --out the weights in the package are replaced.
"""

import argparse
import tempfile
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import latecomer
from latecomer.strategies.parts import broadcasts as broadcasting
from latecomer.strategies.parts.broadcast_predictor import (
    WEIGHTS,
    BroadcastClassifier,
    broadcast_features,
)

SCENARIOS = (
    {"data": {"alpha": 0.1}, "fleet": {"devices": 40, "profile": "tiers"}},
    {"data": {"alpha": 0.5}, "fleet": {"devices": 30, "profile": "gamma"}},
    {"data": {"partition": "one-class"}, "fleet": {"devices": 30, "profile": "tiers"}},
)


class Recording(broadcasting.Broadcasting):
    """Broadcasts by Eq. 4, and records every state with its label."""

    features: ClassVar[list[torch.Tensor]] = []
    labels: ClassVar[list[int]] = []

    def on_commit(self, commit, view):
        record = self._records.get(commit.lineage)
        if record is not None and record.last_broadcast is not None and len(record.changes) > 1:
            before = view.store.head_params(commit.lineage)
            accumulated = broadcasting.l1_distance(before, record.last_broadcast)
            self.features.append(
                broadcast_features(record.changes, accumulated, broadcasting.MAX_CHANGES)
            )
            self.labels.append(int(accumulated >= broadcasting.l1_distance(commit.params, before)))
        super().on_commit(commit, view)
        record, before = self._records[commit.lineage], view.store.head_params(commit.lineage)
        change = broadcasting.l1_distance(commit.params, before)
        record.changes = [*record.changes, change][-broadcasting.MAX_CHANGES :]


def record(wanted: int) -> tuple[torch.Tensor, torch.Tensor]:
    """States of all scenarios, equally many of each, spread over the runs."""
    from latecomer.strategies.papers import echopfl

    echopfl.Broadcasting = Recording
    features, labels = [], []
    for seed, scenario in enumerate(SCENARIOS):
        Recording.features, Recording.labels = [], []
        with tempfile.TemporaryDirectory() as folder:
            tree = {
                **scenario,
                "seed": seed,
                "training": {"lr": 0.2},
                "strategy": {"name": "echopfl", "broadcast": "oracle"},
                "stop": {"updates": 3 * wanted},
            }
            latecomer.run(tree, out=Path(folder) / "run")
        chosen = np.linspace(0, len(Recording.labels) - 1, wanted // len(SCENARIOS)).astype(int)
        features += [Recording.features[i] for i in chosen]
        labels += [Recording.labels[i] for i in chosen]
    return torch.stack(features), torch.tensor(labels)


def train(features: torch.Tensor, labels: torch.Tensor, steps: int = 400) -> BroadcastClassifier:
    torch.manual_seed(0)
    network = BroadcastClassifier()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    for _ in range(steps):
        batch = torch.randint(len(labels), (64,))
        optimizer.zero_grad()
        F.cross_entropy(network(features[batch]), labels[batch]).backward()
        optimizer.step()
    return network


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--states", type=int, default=1200)
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    args = parser.parse_args()
    features, labels = record(args.states)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    cut = 3 * len(order) // 4
    network = train(features[order[:cut]], labels[order[:cut]])
    with torch.no_grad():
        right = (network(features[order[cut:]]).argmax(1) == labels[order[cut:]]).float().mean()
    base = max(labels.float().mean().item(), 1 - labels.float().mean().item())
    print(f"{len(labels)} states, {labels.float().mean():.2f} of them labelled broadcast")
    print(f"accuracy on the quarter held back: {right:.3f} (the more frequent label: {base:.3f})")
    save_file(network.state_dict(), args.out)
    print(f"written to {args.out.name}")


if __name__ == "__main__":
    main()
