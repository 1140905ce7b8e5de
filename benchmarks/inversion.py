"""Error and cost of gradient inversion as an estimate of a late device's present update.

A *world* is FedAvg of devices that hold one class each (or Dirichlet mixes), without the holders of
one class. An update that they computed from the model of an early epoch arrives many epochs later.
Their true update for the later model is computed too, and every method is compared with it.

A. Error by staleness: ours, the stale update, first-order compensation with the best lambda, and
   the recipe of the paper taken literally, with the device program it assumes (plain SGD, full
   batches), at several iterations beside the smallest cost of ours for the same error.
B. Error and cost by option; warm starts; devices with other programs and mixes.
C. Server CPU for an epoch's late devices relative to the fleet's training.

All times are CPU seconds on one thread. Tables are Markdown, errors mean ± standard deviation over
late devices and seeds.

    python benchmarks/inversion.py                        # scikit-learn's digits
    python benchmarks/inversion.py --data ../shared/data  # UCI HAR and MNIST; 17 CPU minutes
    python benchmarks/inversion.py --quick                # a smoke test
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from literal_inversion import Point, literal_inversion
from torch import Tensor

from latecomer.core.messages import TrainSpec
from latecomer.data.dataset import Dataset
from latecomer.data.federated_dataset import ClientData, Examples, FederatedDataset, federate
from latecomer.data.sources import load_dataset
from latecomer.device.flat import FlatModel, flat_model
from latecomer.device.kernel import CompiledKernel, compiled_kernel
from latecomer.device.training import local_update, plan_batches, task_rng
from latecomer.strategies.papers.first_order import taylor
from latecomer.strategies.parts.inversion import (
    Effort,
    Estimate,
    InversionTarget,
    invert,
    misfit,
    replay,
    replay_each,
)

FULL = 1_000_000  # a batch size that makes every step see all examples
ASSUMED = TrainSpec(local_epochs=5, batch_size=FULL, lr=0.01, momentum=0.0)
STANDARD = replace(ASSUMED, momentum=0.5)
LAMBDAS = (0.0, *(10 ** (k / 4) for k in range(-8, 25)))
LITERAL_STOPS = (50, 100, 200, 500, 1000)
DEFAULT = Effort()
SMALL = Effort(samples=16, iterations=20)
PAPER = Effort(samples=16, iterations=40, mask=0.05)
ALPHA = 0.1
LATER = 5  # epochs between two updates of one device, for warm starts
ROUNDS = 3
PER_WORLD = 2  # late devices of one world in trade-offs
TESTED = 2000  # examples on which accuracy is measured


@dataclass(frozen=True)
class Problem:
    """Data, a model and a fleet. `share`: the paper's size of D_est for this kind of data."""

    name: str
    source: str
    path: str
    model: str
    hidden: tuple[int, ...] = (64, 32)
    devices: int = 30
    per_device: int = 40
    share: float = 1 / 2
    lr: float = 0.01
    expensive: bool = False  # measured with fewer devices and seeds

    def programmed(self, spec: TrainSpec) -> TrainSpec:
        """`spec` with this problem's learning rate, relative to that of STANDARD."""
        return replace(spec, lr=spec.lr * self.lr / STANDARD.lr)

    def network(self, input_shape: tuple[int, ...], classes: int) -> FlatModel:
        return flat_model(self.model, input_shape, classes, self.hidden)


@dataclass(frozen=True)
class Size:
    """The size of the benchmark."""

    base: int = 10  # the epoch from which late devices train
    staleness: tuple[int, ...] = (5, 10, 20, 50)
    traded: tuple[int, ...] = (20, 50)  # the staleness at which trade-offs are measured
    literal_iterations: int = 2000
    literal_devices: int = 6
    literal_expensive: int = 2
    samples: tuple[int, ...] = (8, 16, 32, 64)
    iterations: tuple[int, ...] = (5, 10, 20, 40, 80, 160)
    effort: Effort = DEFAULT  # the standard setting of the trade-offs
    fleet: int = 100
    late: int = 10

    @property
    def epochs(self) -> tuple[int, ...]:
        ages = {0, LATER, *self.staleness, *self.traded, *(LATER + s for s in self.traded)}
        return tuple(sorted(self.base + age for age in ages))


QUICK = Size(
    base=3,
    staleness=(2, 5),
    traded=(2, 5),
    literal_iterations=60,
    literal_devices=1,
    literal_expensive=1,
    samples=(8, 16),
    iterations=(5, 20),
    effort=Effort(samples=8, iterations=8),
    fleet=20,
    late=2,
)


# The world.


@dataclass(frozen=True, eq=False)
class World:
    """The global model by epoch, and the late devices that did not contribute to it."""

    network: FlatModel
    spec: TrainSpec
    heads: dict[int, Tensor]
    late: list[ClientData]
    seed: int
    accuracy: dict[int, float]

    @cache  # noqa: B019  (worlds live as long as the benchmark)
    def updates(self, epoch: int) -> list[Tensor]:
        """The true deltas of the late devices for the model of `epoch`."""
        return [
            trained(self.network, self.heads[epoch], client.train, self.spec, i, epoch)
            for i, client in enumerate(self.late)
        ]

    def targets(self, epoch: int) -> list[InversionTarget]:
        return [
            InversionTarget(self.heads[epoch], delta, self.spec, len(client.train.y), self.start(i))
            for i, (delta, client) in enumerate(zip(self.updates(epoch), self.late, strict=True))
        ]

    def start(self, device: int) -> int:
        return 1_000 * self.seed + 10 * device


def trained(
    network: FlatModel, head: Tensor, examples: Examples, spec: TrainSpec, device: int, number: int
) -> Tensor:
    plan = plan_batches(len(examples.y), spec, task_rng(0, device, number))
    return local_update(network, head, *examples, spec, plan) - head


@cache
def dataset(source: str, path: str) -> Dataset:
    return load_dataset(source, path)


def federation(problem: Problem, devices: int, alpha: float, seed: int) -> FederatedDataset:
    """One class per device or, with `alpha`, Dirichlet mixes."""
    return federate(
        dataset(problem.source, problem.path),
        partition="dirichlet" if alpha else "one-class",
        devices=devices,
        alpha=alpha or 1.0,
        test="fair",
        scale="global",
        augment="none",
        per_device=problem.per_device,
        seed=seed,
    )


@cache
def world(problem: Problem, spec: TrainSpec, alpha: float, seed: int, size: Size) -> World:
    """Train without the holders of one class; which one changes with the seed."""
    data = federation(problem, problem.devices, alpha, seed)
    network = problem.network(data.input_shape, data.num_classes)
    kernel = compiled_kernel(network) if problem.expensive else None
    if isinstance(kernel, CompiledKernel):
        network.kernel = kernel  # for the devices; inversion does not use it
    held = data.class_counts()[:, (5 + 2 * seed) % data.num_classes]
    holders = int((held > 0).sum()) if not alpha else 3
    late = held.argsort(descending=True)[:holders].tolist()
    present = [i for i in range(problem.devices) if i not in late]
    spec = problem.programmed(spec)
    head = network.init(seed)
    heads, accuracy = {}, {}
    for epoch in range(size.epochs[-1] + 1):
        if epoch in size.epochs:
            heads[epoch] = head
            with torch.no_grad():
                right = network.logits(head, data.test.x[:TESTED]).argmax(1) == data.test.y[:TESTED]
            accuracy[epoch] = right.float().mean().item()
        deltas = [trained(network, head, data.clients[i].train, spec, i, epoch) for i in present]
        head = head + torch.stack(deltas).mean(0)
    return World(network, spec, heads, [data.clients[i] for i in late], seed, accuracy)


@cache
def first_devices(some: World, number: int) -> World:
    return replace(some, late=some.late[:number])


# Measuring.


class MeanAndSpread(NamedTuple):
    mean: float
    deviation: float

    def __str__(self) -> str:
        return f"{self.mean:.3g} ± {self.deviation:.1g}"


def spread(values: Sequence[float]) -> MeanAndSpread:
    return MeanAndSpread(
        *(v.item() for v in torch.std_mean(torch.tensor(values), correction=0)[::-1])
    )


class Errors(NamedTuple):
    """Relative L1 error and cosine distance of every estimate."""

    l1: list[float]
    cosine: list[float]


def errors(estimates: Iterable[Tensor], deltas: Iterable[Tensor]) -> Errors:
    pairs = list(zip(estimates, deltas, strict=True))
    cosine = [1 - F.cosine_similarity(*pair, dim=0).item() for pair in pairs]
    return Errors([misfit(*pair) for pair in pairs], cosine)


def joined(parts: Iterable[Errors]) -> Errors:
    some = list(parts)
    return Errors(*(list(chain.from_iterable(kind)) for kind in zip(*some, strict=True)))


class Result(NamedTuple):
    """A method: its errors by staleness, and CPU seconds per device."""

    errors: dict[int, Errors]
    cpu: float = 0.0

    def l1(self, staleness: int) -> float:
        return spread(self.errors[staleness].l1).mean


def stale(worlds: Sequence[World], base: int, ages: Sequence[int], lam: float = 0.0) -> Result:
    """The stale update, or its first-order expansion."""

    def estimates(some: World, age: int) -> list[Tensor]:
        drift = some.heads[base + age] - some.heads[base]
        return [taylor(delta, drift, lam) for delta in some.updates(base)]

    return Result(
        {
            age: joined(errors(estimates(some, age), some.updates(base + age)) for some in worlds)
            for age in ages
        }
    )


def first_order(worlds: Sequence[World], base: int, ages: Sequence[int]) -> tuple[Result, str]:
    """The errors with the best lambda at each staleness, and these lambdas."""
    best: dict[int, tuple[float, Errors]] = {}
    for age in ages:
        tried = [(lam, stale(worlds, base, [age], lam)) for lam in LAMBDAS]
        lam, result = min(tried, key=lambda pair: _or_infinite(pair[1].l1(age)))
        best[age] = (lam, result.errors[age])
    lambdas = ", ".join(f"{lam:.3g}" for lam, _ in best.values())
    return Result({age: found for age, (_, found) in best.items()}), lambdas


def _or_infinite(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def replayed(
    worlds: Sequence[World], found: Sequence[Sequence[Estimate]], base: int, ages: Sequence[int]
) -> dict[int, Errors]:
    """The errors of every world's estimates when replayed on the models of later epochs."""
    return {
        age: joined(
            errors(
                replay_each(some.network, [some.heads[base + age]] * len(estimates), estimates),
                some.updates(base + age),
            )
            for some, estimates in zip(worlds, found, strict=True)
        )
        for age in ages
    }


@cache
def ours(worlds: tuple[World, ...], base: int, ages: tuple[int, ...], effort: Effort) -> Result:
    """Cold inversions, the late devices of all worlds in one batch."""
    found, cpu = inverted(worlds, [some.targets(base) for some in worlds], effort)
    return Result(replayed(worlds, found, base, ages), cpu)


def inverted(
    worlds: Sequence[World], tasks: Sequence[Sequence[InversionTarget]], effort: Effort
) -> tuple[list[list[Estimate]], float]:
    """Estimates for the devices of every world, and the CPU seconds for each."""
    flat = list(chain.from_iterable(tasks))
    start = time.process_time()
    found = invert(worlds[0].network, flat, effort)
    cpu = (time.process_time() - start) / len(flat)
    return by_world(worlds, found), cpu


# Tables.

Row = dict[str, Any]


class Report:
    """Prints each table, and keeps all for JSON."""

    def __init__(self) -> None:
        self.tables: list[dict[str, Any]] = []

    def table(self, part: str, title: str, rows: Sequence[Row], note: str = "") -> None:
        header = list(rows[0])
        print(f"\n### {part}. {title}\n")
        print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")
        for row in rows:
            print(f"| {' | '.join(_cell(row[key]) for key in header)} |")
        if note:
            print(f"\n{note}")
        print(end="", flush=True)
        self.tables.append({"part": part, "title": title, "rows": rows, "note": note})


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def cells(result: Result) -> Row:
    l1 = {f"L1 at {age}": spread(found.l1) for age, found in result.errors.items()}
    cosine = {f"cos at {age}": spread(found.cosine) for age, found in result.errors.items()}
    return {**l1, **cosine, "CPU s": result.cpu}


# A. Error by staleness.


def part_a(report: Report, problem: Problem, seeds: Sequence[int], size: Size) -> None:
    worlds = tuple(world(problem, ASSUMED, 0.0, seed, size) for seed in seeds)
    base, ages = size.base, size.staleness
    best, lambdas = first_order(worlds, base, ages)
    results = {"stale update": stale(worlds, base, ages), "first-order, best lambda": best}
    number = size.literal_expensive if problem.expensive else size.literal_devices
    chosen = spread_out(worlds, number)
    curves = literal_curves(problem, chosen, size)
    for name, (points, found) in curves.items():
        first = next((i for i, point in enumerate(points) if point.converged), len(points) - 1)
        for i in sorted({first, len(points) - 1}):
            state = "converged" if i == first and points[i].converged else "stopped"
            results[f"{name}, {state} at {points[i].iterations}"] = found[i]
    named = {
        f"ours, {DEFAULT.samples} examples, {DEFAULT.iterations} iterations (default)": DEFAULT,
        f"ours, {SMALL.samples} examples, {SMALL.iterations} iterations (small)": SMALL,
        f"ours, {PAPER.samples} examples, {PAPER.iterations} iterations, mask 5%": PAPER,
    }
    for name, effort in named.items():
        results[name] = ours(worlds, base, ages, effort)
    mine = results[next(iter(named))]
    devices = {key: len(r.errors[ages[0]].l1) for key, r in results.items()}
    report.table(
        "A",
        f"{problem.name}: error of the estimated fresh update by staleness in epochs",
        [
            {"method": name, "devices": devices[name], **cells(result)}
            for name, result in results.items()
        ],
        f"Best lambda at each staleness: {lambdas}. Accuracy of the model without the late "
        f"devices: {accuracy(worlds, base)} when they start, {accuracy(worlds, base + ages[-1])} "
        "at the end. Default against first-order, L1: "
        + ", ".join(f"{mine.l1(age) / best.l1(age):.2f} at {age}" for age in ages)
        + ".",
    )
    name, (points, found) = next(iter(curves.items()))
    equal_error(report, problem, chosen, size, name, points, found)


def accuracy(worlds: Sequence[World], epoch: int) -> MeanAndSpread:
    return spread([some.accuracy[epoch] for some in worlds])


def spread_out(worlds: Sequence[World], number: int) -> tuple[World, ...]:
    """`number` late devices, taken from the worlds in rotation."""
    counts = [len(range(i, number, len(worlds))) for i in range(len(worlds))]
    return tuple(first_devices(some, n) for some, n in zip(worlds, counts, strict=True) if n)


Curve = tuple[list[Point], list[Result]]


def literal_curves(problem: Problem, worlds: Sequence[World], size: Size) -> dict[str, Curve]:
    """The literal recipe: as given, with the mask, and for sensors with the larger size too."""
    effort = Effort(share=problem.share, iterations=size.literal_iterations)
    efforts = {
        "literal": effort,
        "literal, mask 5%": replace(effort, mask=0.05),
    }
    if problem.share < 1 / 2:
        efforts["literal, 1/2 of the examples"] = replace(effort, share=1 / 2)
    # Devices of one world may differ by an example; a batch may not.
    tasks = [task for some in worlds for task in some.targets(size.base)]
    min_examples = min(task.num_examples for task in tasks)
    tasks = [replace(task, num_examples=min_examples) for task in tasks]
    curves = {}
    for name, each in efforts.items():
        points = []
        for point in literal_inversion(worlds[0].network, tasks, each, LITERAL_STOPS):
            points.append(point)
            if point.converged and each is not effort:
                break  # only the plain recipe runs to the last iteration
        results = [
            Result(
                replayed(worlds, by_world(worlds, p.estimates), size.base, size.staleness), p.cpu
            )
            for p in points
        ]
        curves[name] = (points, results)
    return curves


def by_world(worlds: Sequence[World], estimates: Sequence[Estimate]) -> list[list[Estimate]]:
    rest = iter(estimates)
    return [[next(rest) for _ in some.late] for some in worlds]


def equal_error(
    report: Report,
    problem: Problem,
    worlds: tuple[World, ...],
    size: Size,
    name: str,
    points: Sequence[Point],
    found: Sequence[Result],
) -> None:
    """By iterations of the literal recipe: the least CPU of ours for the same error and devices."""
    efforts = [Effort(samples=16, iterations=n) for n in (5, 10, 20, 40) if n in size.iterations]
    efforts += [Effort(samples=32, iterations=n) for n in (40, 80) if n in size.iterations]
    efforts += [Effort(samples=64, iterations=n) for n in (80, 160) if n in size.iterations]
    settings: list[tuple[str, Result]] = []
    for effort in efforts:
        if settings and all(
            min(mine.l1(age) for _, mine in settings) <= min(theirs.l1(age) for theirs in found)
            for age in size.staleness
        ):
            break  # more effort would show nothing
        result = ours(worlds, size.base, size.staleness, effort)
        settings.append((f"{effort.samples} x {effort.iterations}", result))
    rows: list[Row] = []
    for age in size.staleness:
        for point, theirs in zip(points, found, strict=True):
            enough = [(r.cpu, s, r.l1(age)) for s, r in settings if r.l1(age) <= theirs.l1(age)]
            cpu, setting, l1 = min(enough, default=(None, "not reached", None))
            rows.append(
                {
                    "staleness": age,
                    "literal iterations": point.iterations,
                    "its CPU s": point.cpu,
                    "its L1": theirs.l1(age),
                    "ours": setting,
                    "our CPU s": cpu,
                    "our L1": l1,
                    "ratio of CPU": point.cpu / cpu if cpu else None,
                }
            )
    title = f"{problem.name}: the {name} recipe by iterations, and the smallest cost of ours"
    tried = "; ".join(
        f"{setting}: {result.cpu:.2g} s, "
        + " / ".join(f"{result.l1(age):.3g}" for age in size.staleness)
        for setting, result in settings
    )
    report.table("A", title, rows, f"Ours (examples x iterations: CPU s, L1 by staleness): {tried}")


# B. Trade-offs.


def part_b(report: Report, problem: Problem, seeds: Sequence[int], size: Size) -> None:
    if problem.expensive:
        seeds = seeds[:1]
    base, ages = size.base, size.traded

    def worlds_of(spec: TrainSpec, alpha: float = 0.0) -> tuple[World, ...]:
        found = (world(problem, spec, alpha, seed, size) for seed in seeds)
        return tuple(first_devices(some, PER_WORLD) for some in found)

    def row(what: str, worlds: tuple[World, ...], effort: Effort) -> Row:
        return {"setting": what, **cells(ours(worlds, base, ages, effort))}

    standard_worlds = worlds_of(STANDARD)
    standard = replace(size.effort, samples=16) if problem.expensive else size.effort
    add_table = partial(report.table, "B")
    add_table(
        f"{problem.name}: number of examples in D_est",
        [row(str(n), standard_worlds, replace(standard, samples=n)) for n in size.samples]
        + [
            row(
                f"1/{round(1 / share)} of the device's",
                standard_worlds,
                replace(standard, share=share),
            )
            for share in (1 / 16, 1 / 2)
        ],
    )
    add_table(
        f"{problem.name}: mask, {standard.samples} examples",
        [
            row(f"{mask:g}", standard_worlds, replace(standard, mask=mask))
            for mask in (1.0, 0.6, 0.25, 0.05)
        ],
    )
    add_table(
        f"{problem.name}: iterations of a cold start, {standard.samples} examples",
        [row(str(n), standard_worlds, replace(standard, iterations=n)) for n in size.iterations],
    )
    warm_starts(report, problem, standard_worlds, standard, size)
    mini = worlds_of(replace(STANDARD, batch_size=8))
    stepped = [
        {
            "method": f"ours, {name} steps",
            **cells(ours(mini, base, ages, replace(standard, steps=n))),
        }
        for name, n in (("5", 5), ("10", 10), ("the device's", 1000))
    ]
    add_table(
        f"{problem.name}: steps of the program, device with batches of 8 (20 to 25 steps)",
        [*for_nothing(mini, size), *stepped],
    )
    programs = {
        "SGD": (ASSUMED, 0.0),
        "SGD, momentum 0.5": (STANDARD, 0.0),
        "SGD, momentum 0.5, prox 0.1": (replace(STANDARD, prox=0.1), 0.0),
        "Adam, a tenth of the rate": (replace(ASSUMED, optimizer="adam", lr=STANDARD.lr / 10), 0.0),
        f"Dirichlet {ALPHA}: SGD, momentum 0.5": (STANDARD, ALPHA),
    }
    add_table(
        f"{problem.name}: other programs and mixes, ours with {standard.samples} examples",
        [
            {"device": name, **each}
            for name, (spec, alpha) in programs.items()
            for worlds in [worlds_of(spec, alpha)]
            for each in [
                *for_nothing(worlds, size),
                {"method": "ours", **cells(ours(worlds, base, ages, standard))},
            ]
        ],
    )


def for_nothing(worlds: Sequence[World], size: Size) -> list[Row]:
    """The methods without an inversion."""
    best, lambdas = first_order(worlds, size.base, size.traded)
    return [
        {"method": "stale update", **cells(stale(worlds, size.base, size.traded))},
        {"method": f"first-order, lambda {lambdas}", **cells(best)},
    ]


def warm_starts(
    report: Report, problem: Problem, worlds: Sequence[World], effort: Effort, size: Size
) -> None:
    """An update LATER epochs after the last: warm start, reused examples, or cold start."""
    base, again = size.base, size.base + LATER
    known, _ = inverted(worlds, [some.targets(base) for some in worlds], effort)
    rows = []
    for part in (0.0, 0.05, 0.2, 0.5):
        changed = [with_new_data(some, part) for some in worlds]
        tasks = [some.targets(again) for some in changed]
        starts = {
            f"warm, {effort.warm_iterations} iterations": [
                [replace(s, start=e) for s, e in zip(task, old, strict=True)]
                for task, old in zip(tasks, known, strict=True)
            ],
            f"cold, {effort.iterations} iterations": tasks,
        }
        kept = Result(replayed(changed, known, again, size.traded))
        rows.append({"data replaced": f"{part:.0%}", "start": "reused", **cells(kept)})
        for name, some_tasks in starts.items():
            found, cpu = inverted(changed, some_tasks, effort)
            result = Result(replayed(changed, found, again, size.traded), cpu)
            rows.append({"data replaced": f"{part:.0%}", "start": name, **cells(result)})
    report.table(
        "B", f"{problem.name}: the next update of a device, {LATER} epochs after the last", rows
    )


def with_new_data(some: World, part: float) -> World:
    """Part of every late device's examples is replaced by others of its distribution."""

    def renewed(client: ClientData) -> ClientData:
        size = len(client.train.y)
        new = min(round(part * size), len(client.test.y))
        x, y = (
            torch.cat([fresh[:new], old[new:]])
            for fresh, old in zip(client.test, client.train, strict=True)
        )
        return replace(client, train=Examples(x, y))

    return replace(some, late=[renewed(client) for client in some.late])


# C. Cost on the server.


def part_c(report: Report, problems: Sequence[Problem], size: Size) -> None:
    rows = []
    for problem in problems:
        for passes in (2, 5):
            rows += server_cost(problem, replace(STANDARD, local_epochs=passes), size)
    report.table(
        "C",
        f"{size.late} late devices of {size.fleet}: the server's CPU against the fleet's",
        rows,
        "The fleet trains one by one in plain PyTorch. Best of several rounds; every "
        "compensation includes the replay on the present model.",
    )


def server_cost(problem: Problem, spec: TrainSpec, size: Size) -> list[Row]:
    """One epoch: training of the whole fleet, and three compensations of the late devices."""
    data = federation(problem, size.fleet, ALPHA, 0)
    network = problem.network(data.input_shape, data.num_classes)
    spec = problem.programmed(spec)
    numbers = count()
    late = data.class_counts()[:, 5].argsort(descending=True)[: size.late].tolist()

    def epoch(head: Tensor) -> list[Tensor]:
        number = next(numbers)
        return [
            trained(network, head, client.train, spec, i, number)
            for i, client in enumerate(data.clients)
        ]

    heads = [network.init(0)]
    deltas = []
    for _ in range(4):
        deltas.append(epoch(heads[-1]))
        heads.append(heads[-1] + torch.stack(deltas[-1]).mean(0))
    fleet = best_cpu(lambda: epoch(heads[-1]))

    def targets(version: int, starts: Sequence[Estimate | None]) -> list[InversionTarget]:
        examples = [len(data.clients[i].train.y) for i in late]
        return [
            InversionTarget(heads[version], deltas[version][i], spec, n, 10 * i, start)
            for i, n, start in zip(late, examples, starts, strict=True)
        ]

    effort = size.effort
    cold = targets(0, [None] * len(late))
    known = invert(network, cold, effort)
    warm = targets(3, known)

    def invert_and_replay(tasks: Sequence[InversionTarget]) -> None:
        replay_each(network, [heads[-1]] * len(tasks), invert(network, tasks, effort))

    def check_and_replay() -> None:
        for task, estimate in zip(warm, known, strict=True):
            replay(network, task.base, estimate)
            replay(network, heads[-1], estimate)

    rounds = 1 if problem.expensive else ROUNDS
    ways = {
        f"cold, {effort.iterations} iterations": best_cpu(lambda: invert_and_replay(cold), rounds),
        f"warm, {effort.warm_iterations} iterations": best_cpu(lambda: invert_and_replay(warm)),
        "reused (two replays)": best_cpu(check_and_replay),
    }
    examples = sorted(len(client.train.y) for client in data.clients)[len(data.clients) // 2]
    return [
        {
            "problem": problem.name,
            "local epochs": spec.local_epochs,
            "examples": examples,
            "fleet CPU s": fleet,
            "late devices": name,
            "server CPU s": cpu,
            "ratio": cpu / fleet,
        }
        for name, cpu in ways.items()
    ]


def best_cpu(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    times = []
    for _ in range(rounds):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


# The command.


def problems(data: Path | None, quick: bool) -> dict[str, list[Problem]]:
    """The problems of each part."""
    digits = Problem("digits, MLP", "digits", "", "mlp", per_device=32, lr=0.1)
    small = Problem("digits, LeNet", "digits", "", "lenet", devices=20, lr=0.1, expensive=True)
    if quick:
        some = replace(digits, devices=10)
        return {"A": [some], "B": [some], "C": [some]}
    if data is None:
        return {part: [digits, small] for part in "ABC"}
    har = Problem("UCI HAR, MLP", "npz", str(data / "uci_har.npz"), "mlp", (128, 64), share=1 / 16)
    mnist = Problem(
        "MNIST, LeNet", "mnist", str(data / "mnist.npz"), "lenet", devices=20, expensive=True
    )
    return {"A": [digits, har, mnist], "B": [har, mnist], "C": [digits, mnist]}


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--data", type=Path, help="folder with uci_har.npz and mnist.npz")
    arguments.add_argument("--only", default="A,B,C", help="parts to run")
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--quick", action="store_true")
    arguments.add_argument("--json", type=Path, default=Path("benchmarks/results/inversion.json"))
    options = arguments.parse_args()
    torch.set_num_threads(1)
    size = QUICK if options.quick else Size()
    seeds = range(1 if options.quick else options.seeds)
    chosen = problems(options.data, options.quick)
    report = Report()
    parts = options.only.split(",")
    if not set(parts) <= set("ABC"):
        arguments.error(f"--only {options.only}: expected some of A,B,C")
    for part in parts:
        if part == "C":
            part_c(report, chosen["C"], size)
            continue
        for problem in chosen[part]:
            (part_a if part == "A" else part_b)(report, problem, seeds, size)
    print(f"\n{time.process_time():.0f} CPU s in all, {len(seeds)} seeds")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    result = {"size": asdict(size), "seeds": len(seeds), "tables": report.tables}
    options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
