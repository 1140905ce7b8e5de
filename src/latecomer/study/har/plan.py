"""What the study runs: three ways of learning, and one decision changed at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from latecomer.core.messages import TrainSpec
from latecomer.device.kernel import CompiledKernel, compiled_kernel
from latecomer.errors import BadInput, did_you_mean
from latecomer.strategies.recipe import find_recipe, resolve_options
from latecomer.study.compare import Cell
from latecomer.study.config import Config, Section, Tree, merged, parse
from latecomer.study.experiment import Experiment

CENTRALISED, SYNCHRONOUS, ASYNCHRONOUS = "centralised", "synchronous", "asynchronous"
PARADIGMS = (CENTRALISED, SYNCHRONOUS, ASYNCHRONOUS)
FEDERATED = (SYNCHRONOUS, ASYNCHRONOUS)

BASE = "base"  # the factor of a run in which nothing is changed
BUSY = "busy"  # another strategy and a slow server: to be compared with that strategy alone
EVALUATION_PER_MERGE = 10  # a busy server's evaluation takes so many merges (the paper: 10 s, 1 s)
QUICKER = 5  # how many times fewer updates a quick study makes
MIXING_OPTIONS = ("mixing", "alpha", "server_lr")  # how strategies call it, by precedence

Positives = Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(strict=False)]
Counts = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(strict=False)]
Waits = Annotated[tuple[Annotated[float, Field(ge=0)], ...], Field(strict=False)]
Names = Annotated[tuple[str, ...], Field(strict=False)]
Augments = Annotated[tuple[Literal["none", "base", "balanced"], ...], Field(strict=False)]
Scales = Annotated[tuple[Literal["global", "local", "none"], ...], Field(strict=False)]
Tests = Annotated[tuple[Literal["fair", "held-out-clients"], ...], Field(strict=False)]
Optimizers = Annotated[tuple[Literal["sgd", "adam"], ...], Field(strict=False)]


class HarConfig(Section):
    """`[study.har]`: the values of each decision; an empty list leaves the decision out."""

    synchronous: str = "fedavg"
    batch_size: Counts = (32, 128)
    lr: Positives = (0.001, 0.01, 0.1)
    augment: Augments = ("none", "base", "balanced")
    scale: Scales = ("global", "local")
    optimizer: Optimizers = ("sgd", "adam")
    adam_lr: Positives = (0.001,)
    mixing: Positives = (0.2, 0.4, 0.8)
    server_delay: Waits = (0.0, 1.0)
    strategies: Names = ("async-share", "fedasync")
    test: Tests = ("fair", "held-out-clients")


@dataclass(frozen=True)
class Variant:
    """One way of learning with at most one decision changed."""

    paradigm: str
    factor: str
    value: str
    tree: Tree
    devices: int  # that train

    @property
    def label(self) -> str:
        if self.factor == BASE:
            return self.paradigm
        return f"{self.paradigm}-{self.factor}-{self.value}"

    def cell(self, seed: int) -> Cell:
        return Cell(self.label, seed, {**self.tree, "seed": seed})


@dataclass(frozen=True)
class Plan:
    """All runs of a study, and the values that were not changed."""

    variants: tuple[Variant, ...]
    base: Mapping[str, str]  # factor -> value in the base runs
    rounds: int
    devices: int
    strategy: str  # the asynchronous one

    def cells(self, seeds: Sequence[int]) -> list[Cell]:
        # Seed by seed: an interrupted study has whole comparisons.
        return [variant.cell(seed) for seed in seeds for variant in self.variants]

    def find(self, paradigm: str, factor: str = BASE, value: str = "") -> Variant | None:
        """The variant; the base run where the value is the base value."""
        if self.base.get(factor) == value:
            factor, value = BASE, ""
        for variant in self.variants:
            if (variant.paradigm, variant.factor, variant.value) == (paradigm, factor, value):
                return variant
        return None

    def values(self, factor: str) -> list[str]:
        """All values of a factor, the base value first."""
        found = [v.value for v in self.variants if v.factor == factor]
        return [self.base[factor], *dict.fromkeys(found)] if found else []

    @property
    def factors(self) -> list[str]:
        return list(dict.fromkeys(v.factor for v in self.variants if v.factor != BASE))


@dataclass(frozen=True)
class _Decision:
    factor: str
    paradigms: tuple[str, ...]
    base: str
    changes: Mapping[str, Tree]  # value -> what it changes


def make_plan(tree: Mapping[str, Any], quick: bool = False) -> Plan:
    """The runs for the scenario in `tree`; everything that can be wrong is found here."""
    config = parse(tree)
    for key in config.study:
        if key != "har":
            hint = did_you_mean(key, ["har"])
            raise BadInput(f"unknown key 'study.{key}'{hint} (known here: har)")
    own = har_config(config.study.get("har", {}))
    if config.stop.epochs or config.stop.virtual_seconds:
        raise BadInput("study har: bound it by stop.updates alone, so that all runs are comparable")
    plain = {key: value for key, value in tree.items() if key not in ("study", "compare")}
    first = Experiment(parse(plain))
    if first.recipe.pooled or first.server().strategy.has_epochs:
        raise BadInput(
            f"strategy.name = {config.strategy.name!r}: the study needs an asynchronous strategy"
            " there; centralised and synchronous runs are added to it"
        )
    devices = len(first.clients)
    rounds = max(1, first.config.stop.updates // devices)
    if quick:
        rounds = max(2, rounds // QUICKER)
    decisions = _decisions(own, first, quick)
    maker = _Maker(plain, own, rounds, first)
    variants = [maker.variant(paradigm, BASE, "", {}) for paradigm in PARADIGMS]
    for decision in decisions:
        variants += [
            maker.variant(paradigm, decision.factor, value, change)
            for value, change in decision.changes.items()
            if value != decision.base
            for paradigm in decision.paradigms
        ]
    base = {decision.factor: decision.base for decision in decisions}
    return Plan(tuple(variants), base, rounds, devices, config.strategy.name)


def har_config(table: Any) -> HarConfig:
    try:
        return HarConfig.model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(["study.har", *(str(part) for part in first["loc"])])
        if first["type"] == "extra_forbidden":
            known = list(HarConfig.model_fields)
            hint = did_you_mean(str(first["loc"][-1]), known)
            raise BadInput(f"unknown key {key!r}{hint} (known here: {', '.join(known)})") from None
        message = first["msg"].removeprefix("Value error, ")
        raise BadInput(f"{key} = {first['input']!r}: {message}") from None


def _decisions(own: HarConfig, first: Experiment, quick: bool) -> list[_Decision]:
    config, base = first.config, first.config.training
    mixing = _mixing_option(config.strategy.name)
    share = config.strategy.options.get(mixing) if mixing else None
    found = [
        _Decision(
            "lr", PARADIGMS, f"{base.lr:g}", {f"{v:g}": {"training": {"lr": v}} for v in own.lr}
        ),
        _Decision(
            "batch_size",
            PARADIGMS,
            str(base.batch_size),
            {str(v): {"training": {"batch_size": v}} for v in own.batch_size},
        ),
        _Decision(
            "augment",
            PARADIGMS,
            config.data.augment,
            {v: {"data": {"augment": v}} for v in own.augment},
        ),
        _Decision(
            "scale",
            FEDERATED,
            config.data.scale,
            {v: {"data": {"scale": v}} for v in own.scale},
        ),
        _Decision("optimizer", FEDERATED, _optimizer(base.optimizer), _optimizers(own)),
        _Decision(
            "mixing",
            (ASYNCHRONOUS,),
            f"{share:g}" if share is not None else "-",
            {f"{v:g}": {"strategy": {mixing: v}} for v in own.mixing} if mixing else {},
        ),
        _Decision(
            "server_delay",
            (ASYNCHRONOUS,),
            f"{config.server.merge_seconds:g}",
            {
                f"{v:g}": {
                    "server": {"merge_seconds": v, "evaluate_seconds": EVALUATION_PER_MERGE * v}
                }
                for v in own.server_delay
            },
        ),
        _Decision(
            "strategy",
            (ASYNCHRONOUS,),
            config.strategy.name,
            {v: {"strategy": {"name": v}} for v in own.strategies},
        ),
        _Decision(BUSY, (ASYNCHRONOUS,), config.strategy.name, _busy(own, config)),
        _Decision(
            "test",
            FEDERATED,
            config.data.test,
            {v: {"data": {"test": v}} for v in own.test},
        ),
    ]
    if quick:
        found = [_only_last(decision) for decision in found]
    return [d for d in found if any(value != d.base for value in d.changes)]


def _busy(own: HarConfig, config: Config) -> dict[str, Tree]:
    """The other strategies with the slowest server: what delay does hangs on the strategy."""
    slowest = max(own.server_delay, default=0.0)
    if slowest <= config.server.merge_seconds:
        return {}
    delay = {"merge_seconds": slowest, "evaluate_seconds": EVALUATION_PER_MERGE * slowest}
    return {v: {"strategy": {"name": v}, "server": delay} for v in own.strategies}


def _only_last(decision: _Decision) -> _Decision:
    """The decision with a single other value."""
    others = [value for value in decision.changes if value != decision.base][-1:]
    return _Decision(
        decision.factor,
        decision.paradigms,
        decision.base,
        {value: decision.changes[value] for value in others},
    )


def _optimizer(name: str) -> str:
    return "sgd-m" if name == "sgd" else name


def _optimizers(own: HarConfig) -> dict[str, Tree]:
    """The optimisers as they are, and Adam once more with a learning rate of its own."""
    found: dict[str, Tree] = {
        _optimizer(name): {"training": {"optimizer": name}} for name in own.optimizer
    }
    if "adam" in own.optimizer:
        found |= {
            f"adam {lr:g}": {"training": {"optimizer": "adam", "lr": lr}} for lr in own.adam_lr
        }
    return found


def _mixing_option(strategy: str) -> str:
    """What the strategy calls the weight of an update; empty if it has none."""
    options = signature(find_recipe(strategy).build).parameters
    return next((name for name in MIXING_OPTIONS if name in options), "")


class _Maker:
    """Makes variants of one scenario, checked, without laying its data out for each of them."""

    def __init__(self, plain: Tree, own: HarConfig, rounds: int, first: Experiment) -> None:
        self.plain, self.own, self.rounds, self.first = plain, own, rounds, first
        self._kernel = compiled_kernel(first.model)
        self._training = {first.config.data.test: len(first.clients)}  # test -> devices that train

    def variant(self, paradigm: str, factor: str, value: str, change: Mapping[str, Any]) -> Variant:
        tree = merged(self.plain, change)
        if paradigm == CENTRALISED:
            tree["strategy"] = {"name": "centralised"}
        elif paradigm == SYNCHRONOUS:
            tree["strategy"] = {"name": self.own.synchronous}
        elif factor in ("strategy", BUSY):
            tree["strategy"] = {"name": value}  # options belong to the other one
        config = parse(tree, f"study har, {paradigm} {factor} {value}".strip())
        recipe = find_recipe(config.strategy.name)
        strategy = recipe.make(resolve_options(recipe, config.strategy.options))
        if paradigm == SYNCHRONOUS and not strategy.has_epochs:
            raise BadInput(f"study.har.synchronous = {recipe.name!r}: must be one with rounds")
        devices = self._devices(config)
        # One update of a pooled run passes over everybody's data, as a round of all devices does.
        each = 1 if paradigm == CENTRALISED else devices
        tree = merged(tree, {"stop": {"updates": self.rounds * each}, "evaluate": {"every": each}})
        if config.engine.kernel == "auto":
            # A study makes so many runs that compiling always pays. Where it does not apply, one
            # by one is faster than in batches, as people's data differ much in size.
            spec = strategy.prepare(TrainSpec(**config.training.model_dump()))
            fast = isinstance(self._kernel, CompiledKernel) and self._kernel.covers(spec)
            tree = merged(tree, {"engine": {"kernel": "compiled" if fast else "plain"}})
        return Variant(paradigm, factor, value, tree, devices)

    def _devices(self, config: Config) -> int:
        """How many devices train: held-out ones do not."""
        test = config.data.test
        if test not in self._training:
            changed = self.first.config.data.model_copy(update={"test": test})
            other = Experiment(self.first.config.model_copy(update={"data": changed}))
            self._training[test] = len(other.clients)
        return self._training[test]
