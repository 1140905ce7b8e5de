"""Attacks on an update: recovery of samples and labels, at several masks of its coordinates.

The setting of the papers behind `strategies/parts/inversion.py`: a device with a single sample and
one step of gradient descent. The attacker knows the label and the training program, runs some
hundred iterations from each of several starts and keeps the best fit. A bad fit is a failed attack,
not an effect of the mask. Baselines are guesses that need no update: a result that is no closer to
the sample than those is no recovery. The error alone is not enough: with the wrong contrast
a sample has the error of noise and can still be readable, hence correlation and accuracy.

    python benchmarks/privacy.py [--quick] [--data ../shared/data] [--out DIR] [--json FILE]
"""

import argparse
import base64
import html
import json
import math
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from latecomer.core.messages import TrainSpec
from latecomer.data.scaling import moments, standardise
from latecomer.data.sources import load_dataset
from latecomer.device.flat import FlatModel, flat_model
from latecomer.device.training import local_update, plan_batches
from latecomer.strategies.parts.inversion import (
    Effort,
    Estimate,
    InversionTarget,
    effective_rate,
    invert,
    local_steps,
    top_mask,
)
from latecomer.strategies.parts.labels import allocate_labels, label_shares, output_bias

STEP = TrainSpec(local_epochs=1, batch_size=1, lr=0.1, momentum=0.0)
PROGRAM = TrainSpec(local_epochs=2, batch_size=16, lr=0.01, momentum=0.5)  # of the label clients
FIRST_EPOCHS = TrainSpec(local_epochs=5, batch_size=16, lr=0.02, momentum=0.9)
CLASSIFIER = TrainSpec(local_epochs=20, batch_size=32, lr=0.02, momentum=0.9)
MASKS = {"untrained": (1.0, 0.6, 0.25, 0.05), "trained": (1.0, 0.05)}
MASK = 0.05
UNKNOWN = 0.3  # weight of an input that is only known to be small; 1 for a known one
START = 0.3  # standard deviation of the attacker's initial sample, in those of the data
OTHERS = 4_000  # public samples, for the classifier
TRAINED_ON = 800  # of these, the network that is attacked has seen in its first epochs
SHOWN = 4  # samples in a plot
PAPER_VARIANCE = 1e-3
READ = ("TV distance", "labels right", "labels right by sign")
COSINE = "cosine"
EXACT = 0.01  # an input counts as recovered within this part of its value


Row = dict[str, object]


@dataclass(frozen=True)
class Setting:
    """A dataset and the network that is attacked on it."""

    data: str
    model: str
    source: str = "npz"
    file: str = ""


DIGITS = [Setting("digits", "lenet", "digits"), Setting("digits", "mlp", "digits")]
REAL = [
    Setting("MNIST", "lenet", file="mnist.npz"),
    Setting("UCI HAR", "mlp", file="uci_har.npz"),
    Setting("watch", "cnn1d", file="watch.npz"),
    Setting("watch", "mlp", file="watch.npz"),
]


@dataclass(frozen=True)
class Budget:
    samples: int
    iterations: int
    clients: int


class Data:
    """Victims, and others like them; series and tables standardised, images as they are."""

    def __init__(self, setting: Setting, folder: Path | None) -> None:
        path = str(folder / setting.file) if folder is not None and setting.file else ""
        found = load_dataset(setting.source, path)
        x = found.x if found.x.ndim == 4 else standardise(found.x, moments(found.x))
        order = torch.randperm(len(x), generator=seeded(0))
        self.x, self.y = torch.from_numpy(x)[order], torch.from_numpy(found.y)[order]
        self.classes = found.num_classes
        self.shape = tuple(self.x.shape[1:])
        self.others = min(OTHERS, len(x) // 2)
        self.mean, self.std = self.x.mean().item(), self.x.std().item()

    @property
    def is_series(self) -> bool:
        return len(self.shape) == 2

    @cached_property
    def classifier(self) -> Callable[[Tensor], Tensor]:
        """An MLP trained on the others, whatever network is attacked."""
        network = flat_model("mlp", self.shape, self.classes)
        params = self.trained(network, network.init(77), CLASSIFIER, self.others)
        return lambda x: network.logits(params, x).argmax(1)

    def trained(self, network: FlatModel, params: Tensor, spec: TrainSpec, count: int) -> Tensor:
        x, y = self.x[:count], self.y[:count]
        return local_update(network, params, x, y, spec, plan_batches(len(x), spec, seeded(1)))

    def base(self, network: FlatModel, state: str) -> Tensor:
        """The model the device was sent."""
        params = network.init(4)
        if state == "untrained":
            return params
        return self.trained(network, params, FIRST_EPOCHS, TRAINED_ON)

    def accuracy(self, network: FlatModel, params: Tensor) -> float:
        x, y = self.x[self.others :][:1000], self.y[self.others :][:1000]
        return (network.logits(params, x).argmax(1) == y).float().mean().item()

    def noise(self, count: int) -> Tensor:
        return self.mean + self.std * torch.randn(count, *self.shape, generator=seeded(2))

    def of_same_class(self, labels: Tensor) -> Tensor:
        """One of the others for each label: what knowing the label alone is worth."""
        known = self.y[: self.others]
        return torch.stack([self.x[int((known == label).nonzero()[0])] for label in labels])


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def update_of(network: FlatModel, base: Tensor, x: Tensor, y: Tensor, spec: TrainSpec) -> Tensor:
    return local_update(network, base, x, y, spec, plan_batches(len(x), spec, seeded(3))) - base


def attack(
    network: FlatModel,
    base: Tensor,
    deltas: Sequence[Tensor],
    labels: Tensor,
    data: Data,
    mask: float,
    budget: Budget,
    spec: TrainSpec = STEP,
) -> list[Estimate]:
    """The best fit of three kinds of starts.

    The first is that of the server: fast, with the label estimated from the update. The others have
    the true label and small steps, from around the mean of the data and from `by_division`.
    """
    effort = Effort(
        samples=1,
        iterations=budget.iterations,
        warm_iterations=budget.iterations,
        mask=mask,
        scale=START * data.std,
    )
    near = data.mean + START * data.std * torch.randn(
        len(deltas), *data.shape, generator=seeded(100)
    )
    divided = by_division(network, base, deltas, data, mask, budget.iterations)
    cold = [InversionTarget(base, delta, spec, 1, seed=i) for i, delta in enumerate(deltas)]
    tries = [invert(network, cold, effort)]
    for x in (near, divided):
        guesses = [
            Estimate(one.unsqueeze(0), label.reshape(1), torch.zeros(1), spec, steps=1)
            for one, label in zip(x, labels, strict=True)
        ]
        warm = [replace(s, start=guess) for s, guess in zip(cold, guesses, strict=True)]
        tries.append(invert(network, warm, effort))
    return [min(some, key=lambda estimate: estimate.fit) for some in zip(*tries, strict=True)]


def by_division(
    network: FlatModel,
    base: Tensor,
    deltas: Sequence[Tensor],
    data: Data,
    mask: float,
    iterations: int,
) -> Tensor:
    """Samples that give the first linear layer the inputs of `ratios`; unknown ones near zero."""
    found = [ratios(network, masked(delta, mask)) for delta in deltas]
    inputs, known = (torch.stack(parts) for parts in zip(*found, strict=True))
    counts = torch.where(known, 1.0, UNKNOWN) / inputs.abs().sum(1, keepdim=True).clamp_min(1e-9)
    x = torch.full((len(deltas), *data.shape), data.mean, requires_grad=True)
    adam = torch.optim.Adam([x], 0.1 * data.std)
    cooling = torch.optim.lr_scheduler.CosineAnnealingLR(adam, iterations)
    for _ in range(iterations):
        adam.zero_grad()
        misses = (linear_inputs(network, base, x) - inputs).abs()
        torch.autograd.backward((counts * misses).sum())
        adam.step()
        cooling.step()
    return x.detach()


def time_warp(a: Tensor, b: Tensor) -> float:
    """Dynamic time warping of two series (time, channels), per time step.

    Sakoe and Chiba, Dynamic programming algorithm optimization for spoken word recognition, 1978.
    """
    cost = torch.cdist(a, b).tolist()
    above = [0.0] + [math.inf] * len(b)
    for row in cost:
        here = [math.inf]
        for j, value in enumerate(row):
            here.append(value + min(above[j], above[j + 1], here[j]))
        above = here
    return above[-1] / len(a)


def closeness(found: Tensor, actual: Tensor, labels: Tensor, data: Data) -> dict[str, list[float]]:
    """One value per sample and measure."""
    a, b = found.flatten(1), actual.flatten(1)
    mse = (a - b).square().mean(1)
    peak = b.max(1).values - b.min(1).values
    measures = {
        "MSE": mse,
        "PSNR": 10 * (peak.square() / mse.clamp_min(1e-12)).log10(),
        "correlation": correlation(a, b),
        "accuracy": (data.classifier(found) == labels).float(),
    }
    rows = {name: values.tolist() for name, values in measures.items()}
    if data.is_series:
        rows["DTW"] = [time_warp(*pair) for pair in zip(found, actual, strict=True)]
    return rows


def correlation(a: Tensor, b: Tensor) -> Tensor:
    a, b = a - a.mean(1, keepdim=True), b - b.mean(1, keepdim=True)
    return F.cosine_similarity(a, b, 1)


def first_linear(network: FlatModel) -> str:
    linear = (n for n, part in network.module.named_modules() if isinstance(part, nn.Linear))
    return str(next(linear))


def linear_inputs(network: FlatModel, params: Tensor, x: Tensor) -> Tensor:
    """What reaches the first linear layer."""
    seen: list[Tensor] = []
    layer = network.module.get_submodule(first_linear(network))
    handle = layer.register_forward_pre_hook(lambda _layer, given: seen.append(given[0]))
    network.logits(params, x)
    handle.remove()
    return seen[0]


def ratios(network: FlatModel, delta: Tensor) -> tuple[Tensor, Tensor]:
    """The inputs of the first linear layer from one masked step, and which of them are known.

    The gradient of a row of weights is the input times the gradient of the row's bias: where both
    survive the mask, their ratio is the input, exactly. No optimisation is needed.
    """
    name = first_linear(network)
    parts = network.layout.unflatten(delta)
    weight, bias = parts[f"{name}.weight"], parts[f"{name}.bias"]
    usable = (weight != 0) & (bias != 0).unsqueeze(1)
    row = (usable * bias.abs().unsqueeze(1)).argmax(0)
    known = usable.any(0)
    ratio = weight.gather(0, row.unsqueeze(0)).squeeze(0) / bias[row]
    return torch.where(known, ratio, 0.0), known


def ratio_row(network: FlatModel, base: Tensor, deltas: Sequence[Tensor], x: Tensor) -> Row:
    shares, live, errors, blind = [], [], [], []
    for delta, actual in zip(deltas, linear_inputs(network, base, x), strict=True):
        found, known = ratios(network, masked(delta, MASK))
        exact = known & ((found - actual).abs() <= EXACT * actual.abs())
        shares.append(exact.float().mean().item())
        live.append((exact.sum() / (actual != 0).sum().clamp_min(1)).item())
        errors.append((found - actual).square().mean().item())
        blind.append(actual.square().mean().item())
    return {
        "inputs": len(actual),
        "recovered": summary(shares),
        "recovered of those not 0": summary(live),
        "MSE, rest set to 0": summary(errors),
        "MSE, all set to 0": summary(blind),
    }


def masked(delta: Tensor, share: float) -> Tensor:
    """The delta with all but the `share` largest coordinates set to 0."""
    mask = top_mask(delta.unsqueeze(0), share)
    return delta if mask is None else delta * mask.squeeze(0)


def recovery(setting: Setting, data: Data, budget: Budget) -> tuple[list[Row], list[Row], str]:
    """Rows of the tables on samples and on ratios, and the plots."""
    network = flat_model(setting.model, data.shape, data.classes)
    x, y = data.x[data.others :][: budget.samples], data.y[data.others :][: budget.samples]
    noise = data.noise(len(x))
    blind = (noise - x).flatten(1).square().mean(1).tolist()

    def compared(where: Row, found: Tensor, **more: object) -> Row:
        measures = closeness(found, x, y, data)
        closer = [mse < limit for mse, limit in zip(measures["MSE"], blind, strict=True)]
        averaged = {name: summary(values) for name, values in measures.items()}
        return {**where, **averaged, "closer than noise": sum(closer) / len(closer), **more}

    rows: list[Row] = []
    divisions: list[Row] = []
    plots = ""
    for state, shares in MASKS.items():
        where: Row = {"data": setting.data, "model": setting.model, "state": state}
        base = data.base(network, state)
        deltas = [update_of(network, base, x[i : i + 1], y[i : i + 1], STEP) for i in range(len(x))]
        pictures = {"true": x}
        for share in shares:
            begin = time.perf_counter()
            found = attack(network, base, deltas, y, data, share, budget)
            fit = summary([estimate.fit for estimate in found])
            kept = f"{share:.0%}"
            pictures[kept] = torch.cat([estimate.x for estimate in found])
            seconds = time.perf_counter() - begin
            rows.append(
                compared({**where, "mask": kept, "fit": fit}, pictures[kept], seconds=seconds)
            )
        kept = f"{MASK:.0%}, division alone"
        pictures[kept] = by_division(network, base, deltas, data, MASK, budget.iterations)
        rows.append(compared({**where, "mask": kept}, pictures[kept]))
        correct = data.accuracy(network, base)
        divisions.append(
            {**where, "model accuracy": correct, **ratio_row(network, base, deltas, x)}
        )
        plots += plot(f"{setting.data}, {setting.model}, {state}", {**pictures, "noise": noise}, y)
    for name, guess in {
        "noise": noise,
        "mean": torch.full_like(x, data.mean),
        "same class": data.of_same_class(y),
        "the sample": x,
    }.items():
        where = {"data": setting.data, "model": "-", "state": "-", "mask": f"guess: {name}"}
        rows.append(compared(where, guess))
    return rows, divisions, plots


def label_recovery(setting: Setting, data: Data, budget: Budget) -> list[Row]:
    """The accuracy of label shares from updates of 20 to 40 samples of one to three classes."""
    network = flat_model(setting.model, data.shape, data.classes)
    clients = [client(data, i) for i in range(budget.clients)]
    rows: list[Row] = []
    for state in MASKS:
        base = data.base(network, state)
        tallies: dict[str, list[tuple[float, ...]]] = {}
        for number, (x, y) in enumerate(clients):
            rate = effective_rate(PROGRAM, local_steps(PROGRAM, len(x)))
            delta = update_of(network, base, x, y, PROGRAM)
            actual = torch.bincount(y, minlength=data.classes) / len(y)
            uniform = torch.full_like(actual, 1 / data.classes)
            guess = START * data.std * torch.randn(32, *data.shape, generator=seeded(number))
            for protection, sent in protections(delta, rate, seeded(number)).items():
                shares = label_shares(network, base, sent, guess, rate)
                by_sign = risen(network, sent)
                read = agreement(uniform if shares is None else shares, actual, len(y))
                _, signed, _ = agreement(uniform if by_sign is None else by_sign, actual, len(y))
                cosine = F.cosine_similarity(sent, delta, 0).item()
                tallies.setdefault(protection, []).append((*read, signed, cosine))
            scores = (*agreement(uniform, actual, len(y)), math.nan, math.nan)
            tallies.setdefault("guess: uniform", []).append(scores)
        where = {"data": setting.data, "model": setting.model, "state": state}
        for protection, all_scores in tallies.items():
            values = [summary(column) for column in zip(*all_scores, strict=True)]
            named = zip((*READ[:2], "classes found", READ[2], COSINE), values, strict=True)
            rows.append({**where, "protection": protection, **dict(named)})
    return rows


def client(data: Data, number: int) -> tuple[Tensor, Tensor]:
    rng = seeded(500 + number)
    held = torch.randperm(data.classes, generator=rng)[: 1 + number % 3]
    size = int(torch.randint(20, 41, (), generator=rng))
    x, y = data.x[data.others :], data.y[data.others :]
    places = torch.isin(y, held).nonzero().squeeze(1)
    chosen = places[torch.randperm(len(places), generator=rng)[:size]]
    return x[chosen], y[chosen]


def protections(delta: Tensor, rate: float, rng: torch.Generator) -> dict[str, Tensor]:
    """The update as an attacker gets it: whole, masked, masked with noise on top."""
    few = masked(delta, MASK)
    unit = torch.randn(delta.shape, generator=rng)
    std = delta.std().item()
    paper = math.sqrt(PAPER_VARIANCE)
    return {
        "none": delta,
        "95% mask": few,
        "mask, noise 1 x its std": few + std * unit,
        "mask, noise 10 x its std": few + 10 * std * unit,
        "mask, gradient noise var 1e-3": few + paper * rate * unit,
        "mask, update noise var 1e-3": few + paper * unit,
    }


def risen(network: FlatModel, delta: Tensor) -> Tensor | None:
    """Labels by the sign alone: the bias of a class rises only where its samples are.

    Zhao, Mopuri and Bilen, iDLG: Improved deep leakage from gradients, 2020.
    """
    place = output_bias(network)
    if place is None:
        return None
    rise = delta[place].clamp_min(0.0)
    return rise / rise.sum() if rise.sum() > 0 else None


def agreement(shares: Tensor, actual: Tensor, size: int) -> tuple[float, float, float]:
    """Total variation distance, labels right if `size` are handed out, true classes found."""
    counts = torch.bincount(allocate_labels(shares, size)[0], minlength=len(actual))
    right = torch.minimum(counts.float(), actual * size).sum().item() / size
    held = int((actual > 0).sum())
    found = (actual[shares.topk(held).indices] > 0).float().mean().item()
    return (shares - actual).abs().sum().item() / 2, right, found


def summary(values: Sequence[float]) -> dict[str, float]:
    tensor = torch.tensor(values)
    return {
        "mean": tensor.mean().item(),
        "spread": tensor.std(correction=0).item(),
        "median": tensor.median().item(),
    }


def table(rows: Sequence[Row]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell(row.get(name)) for name in columns) + " |" for row in rows]
    return "\n".join(lines)


def cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        if math.isnan(value["mean"]):
            return "-"
        return f"{value['mean']:.3g} ± {value['spread']:.2g}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def plot(title: str, pictures: dict[str, Tensor], labels: Tensor) -> str:
    """A row per sample, the true one at the left, which sets the scale of the row."""
    heads = "".join(f"<th>{html.escape(name)}</th>" for name in pictures)
    body = ""
    for i, label in enumerate(labels[:SHOWN].tolist()):
        actual = pictures["true"][i]
        low, high = actual.min().item(), actual.max().item()
        draw = image if actual.dim() == 3 else curves
        cells = "".join(f"<td>{draw(x[i], low, high)}</td>" for x in pictures.values())
        body += f"<tr><th>class {label}</th>{cells}</tr>"
    return f"<h2>{html.escape(title)}</h2><table><tr><th></th>{heads}</tr>{body}</table>"


def image(x: Tensor, low: float, high: float) -> str:
    grey = (255 * (x[0] - low) / (high - low)).round().clamp(0, 255).to(torch.uint8)
    data = base64.b64encode(png(grey)).decode()
    return f'<img alt="" width="96" height="96" src="data:image/png;base64,{data}">'


def png(grey: Tensor) -> bytes:
    """An 8-bit grey image (height, width) as a PNG file."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + body))
        return struct.pack(">I", len(body)) + kind + body + check

    height, width = grey.shape
    lines = b"".join(b"\0" + bytes(row) for row in grey.tolist())
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        chunk(*part)
        for part in ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    )


def curves(x: Tensor, low: float, high: float) -> str:
    """The first three channels of a series, or all features in a line."""
    lines = x.unsqueeze(1) if x.dim() == 1 else x[:, :3]
    size = 150, 90
    heights = (size[1] * (high - lines) / (high - low)).clamp(-5, size[1] + 5)
    step = size[0] / max(1, len(lines) - 1)
    paths = "".join(
        f'<polyline fill="none" stroke="{colour}" points="'
        + " ".join(f"{i * step:.1f},{h:.1f}" for i, h in enumerate(line))
        + '"/>'
        for line, colour in zip(heights.T.tolist(), ("#0072B2", "#D55E00", "#009E73"), strict=False)
    )
    return f'<svg width="{size[0]}" height="{size[1]}">{paths}</svg>'


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>What an update reveals</title>
<style>body {{ font: 15px/1.4 system-ui, sans-serif; margin: 2rem; }}
img {{ image-rendering: pixelated; }} svg {{ border: 1px solid #ddd; }}
th {{ font-weight: normal; padding: .2rem .6rem; }}</style></head><body>
<h1>What an update reveals</h1>
<p>One sample, one step. Columns: the true sample, the one that an attacker recovers from the
largest coordinates of the update (their share above), and noise with the mean and standard
deviation of the data.</p>
{body}</body></html>
"""


def pivot(rows: Iterable[Row], measures: Sequence[str]) -> list[Row]:
    """Label rows with a column per protection; the means of the measures beside each other."""
    wide: dict[tuple[object, ...], Row] = {}
    for row in rows:
        where = {name: row[name] for name in ("data", "model", "state")}
        texts = [cell(row[measure]).partition(" ")[0] for measure in measures]
        wide.setdefault(tuple(where.values()), where)[str(row["protection"])] = " / ".join(texts)
    return list(wide.values())


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--quick", action="store_true", help="a smoke run of some seconds")
    arguments.add_argument("--data", type=Path, help="folder with mnist.npz, uci_har.npz, ...")
    arguments.add_argument("--samples", type=int, default=16)
    arguments.add_argument("--iterations", type=int, default=300)
    arguments.add_argument("--out", type=Path, help="folder for plots.html")
    arguments.add_argument("--json", type=Path, help="all figures")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    budget = Budget(options.samples, options.iterations, clients=30)
    if options.quick:
        budget = Budget(samples=4, iterations=30, clients=6)
    begin = time.perf_counter()
    samples: list[Row] = []
    divisions: list[Row] = []
    labels: list[Row] = []
    plots = ""
    for setting in DIGITS + (REAL if options.data else []):
        data = Data(setting, options.data)
        found, divided, drawn = recovery(setting, data, budget)
        samples += [row for row in found if row not in samples]  # guesses hang on the data alone
        divisions += divided
        plots += drawn
        labels += label_recovery(setting, data, budget)
    results = {"samples": samples, "divisions": divisions, "labels": labels}
    tables = {
        "One sample, one step: how close the recovered sample is (mean ± spread)": samples,
        "One sample, one step: inputs of the first linear layer by weight / bias, "
        "5% kept": divisions,
        "Labels of clients with 20 to 40 samples of one to three classes: TV distance / part of "
        "the labels right / part right by the sign of the bias alone": pivot(labels, READ),
        "What these protections leave of the update: its cosine to the whole": pivot(
            labels, (COSINE,)
        ),
    }
    for title, rows in tables.items():
        print(f"## {title}\n\n{table(rows)}\n")
    print(f"{budget}; {time.perf_counter() - begin:.0f} s")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "plots.html").write_text(PAGE.format(body=plots))


if __name__ == "__main__":
    main()
