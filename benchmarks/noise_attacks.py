"""How far the noise of local privacy protects against two attacks: recovery and membership.

python benchmarks/noise_attacks.py [--data ../shared/data] [--samples 16] [--iterations 300]

Recovery: a device takes one step on one example, which the attacker recovers by gradient inversion
(the attack of privacy.py). Membership: a device takes one step on a batch, and the attacker knows
all of it except which of two examples is in it. Both attackers know the model, the training program
and the noise level. "printed" is the noise of the paper's Delta f, which divides
by the examples of the device; "true" divides by those of the batch.
"""

import argparse
import time
from pathlib import Path

import torch
from privacy import DIGITS, REAL, Budget, Data, Setting, attack, closeness, seeded, summary, table
from torch import Tensor

from latecomer.core.messages import TrainSpec
from latecomer.device.flat import FlatModel, flat_model
from latecomer.device.privacy import Denominator, Privacy, noise_rng, per_release_multiplier
from latecomer.device.training import Plan, local_update

DELTA, CLIP, LR = 1e-5, 2.0, 0.1
LEVELS: list[tuple[str, float, Denominator]] = [
    ("clipped, no noise", 0.0, "batch"),
    *((f"{epsilon:g} printed", epsilon, "dataset") for epsilon in (10.0, 5.0, 1.0)),
    *((f"{epsilon:g} true", epsilon, "batch") for epsilon in (10.0, 5.0, 1.0)),
]
HELD = {"digits": (112, 16), "MNIST": (3840, 64)}  # examples of a device, and of its batch
RELEASES = 40  # of a device in 400 aggregations of ten


def protection(epsilon: float, denominator: Denominator) -> Privacy:
    multiplier = per_release_multiplier(epsilon, DELTA) if epsilon else 0.0
    return Privacy("gaussian", multiplier, CLIP, DELTA, denominator=denominator)


PROGRAM = TrainSpec(local_epochs=1, batch_size=1, lr=LR, momentum=0.0, clip=CLIP)


def step(network: FlatModel, base: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The gradient of one step on all of (x, y), clipped example by example."""
    plan = Plan(torch.arange(len(x)).unsqueeze(0), torch.ones(1, len(x)))
    return (base - local_update(network, base, x, y, PROGRAM, plan)) / LR


def noised(gradient: Tensor, batch: int, n: int, by: Privacy, number: int) -> Tensor:
    """The gradient that leaves a device with n examples after a step on `batch` of them."""
    hook = by.on_gradient([batch], n, PROGRAM, noise_rng(7, 0, number))
    return gradient if hook is None else hook(gradient, 0)


def recovery(setting: Setting, data: Data, budget: Budget) -> list[dict[str, object]]:
    """The distance of the recovered example to the one of the step, by level of noise."""
    network = flat_model(setting.model, data.shape, data.classes)
    base, (n, _) = data.base(network, "untrained"), HELD[setting.data]
    x, y = data.x[data.others :][: budget.samples], data.y[data.others :][: budget.samples]
    rows: list[dict[str, object]] = []

    def add_row(name: str, found: Tensor, **more: object) -> None:
        measured = {key: summary(values) for key, values in closeness(found, x, y, data).items()}
        rows.append({"data": setting.data, "noise": name, **measured, **more})

    steps = [step(network, base, x[i : i + 1], y[i : i + 1]) for i in range(len(x))]
    for name, epsilon, denominator in LEVELS:
        by = protection(epsilon, denominator)
        deltas = [-LR * noised(gradient, 1, n, by, i) for i, gradient in enumerate(steps)]
        found = attack(network, base, deltas, y, data, 1.0, budget, PROGRAM)
        fit = summary([estimate.fit for estimate in found])
        add_row(name, torch.cat([estimate.x for estimate in found]), fit=fit)
    add_row("guess: noise", data.noise(len(x)))
    add_row("guess: mean", torch.full_like(x, data.mean))
    add_row("guess: same class", data.of_same_class(y))
    return rows


def membership(setting: Setting, data: Data, trials: int) -> list[dict[str, object]]:
    """How often two examples are distinguished by the likelihood ratio of Gaussian noise."""
    network = flat_model(setting.model, data.shape, data.classes)
    base, (n, batch) = data.base(network, "untrained"), HELD[setting.data]
    rows: list[dict[str, object]] = []
    x, y = data.x[data.others :], data.y[data.others :]
    pairs = []
    for trial in range(trials):
        order = torch.randperm(len(x), generator=seeded(trial))[: batch + 1]
        either = (torch.cat([order[:1], order[2:]]), order[1:])  # with this example, or that one
        pairs.append([step(network, base, x[places], y[places]) for places in either])
    for name, epsilon, denominator in LEVELS[1:]:
        by, number = protection(epsilon, denominator), 0
        scores = torch.empty(2, trials, RELEASES)
        for trial, (this, that) in enumerate(pairs):
            for which, gradient in enumerate((this, that)):
                for i in range(RELEASES):
                    seen = noised(gradient, batch, n, by, number)
                    scores[which, trial, i] = (seen - (this + that) / 2) @ (this - that)
                    number += 1
        where = {"data": setting.data, "noise": name}
        right = guessed_right(scores[:, :, 0]), guessed_right(scores.sum(2))
        rows.append({**where, "one release": right[0], f"{RELEASES} releases": right[1]})
    return rows


def guessed_right(scores: Tensor) -> float:
    """The share of right guesses which of the two examples was in the batch; 0.5 is chance."""
    return torch.cat([scores[0] > 0, scores[1] < 0]).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with mnist.npz")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--trials", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    budget = Budget(options.samples, options.iterations, clients=0)
    for setting in [DIGITS[0], *(REAL[:1] if options.data else [])]:
        begin = time.process_time()
        data = Data(setting, options.data)
        print(f"## {setting.data}: recovery\n\n{table(recovery(setting, data, budget))}\n")
        rows = table(membership(setting, data, options.trials))
        print(f"## {setting.data}: membership\n\n{rows}\n")
        print(f"{time.process_time() - begin:.0f} CPU s\n", flush=True)


if __name__ == "__main__":
    main()
