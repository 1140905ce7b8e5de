"""The runs of the study: three paradigms, and variants with one decision changed at a time."""

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

BASE = "base"  # the factor of the unchanged runs
BUSY = "busy"  # the factor of runs with another strategy and a slow server
EVALUATION_PER_MERGE = 10  # ratio of server seconds per evaluation and merge (the paper: 10 s, 1 s)
QUICK_DIVISOR = 5  # a quick study makes this many times fewer updates
MIXING_OPTIONS = ("mixing", "alpha", "server_lr")  # names of the mixing ratio, by precedence

Positives = Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(strict=False)]
Counts = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(strict=False)]
Delays = Annotated[tuple[Annotated[float, Field(ge=0)], ...], Field(strict=False)]
Names = Annotated[tuple[str, ...], Field(strict=False)]
Augments = Annotated[tuple[Literal["none", "base", "balanced"], ...], Field(strict=False)]
Scales = Annotated[tuple[Literal["global", "local", "none"], ...], Field(strict=False)]
Tests = Annotated[tuple[Literal["fair", "held-out-clients"], ...], Field(strict=False)]
Optimizers = Annotated[tuple[Literal["sgd", "adam"], ...], Field(strict=False)]


class HarConfig(Section):
    """`[study.har]`: the values of each decision; an empty list omits the decision."""

    synchronous: str = "fedavg"  # the strategy of synchronous runs
    batch_size: Counts = (32, 128)
    lr: Positives = (0.001, 0.01, 0.1)
    augment: Augments = ("none", "base", "balanced")
    scale: Scales = ("global", "local")
    optimizer: Optimizers = ("sgd", "adam")
    adam_lr: Positives = (0.001,)  # further learning rates for Adam
    mixing: Positives = (0.2, 0.4, 0.8)
    server_delay: Delays = (0.0, 1.0)  # server seconds per merge
    strategies: Names = ("async-share", "fedasync")  # further asynchronous strategies
    test: Tests = ("fair", "held-out-clients")


@dataclass(frozen=True)
class Variant:
    """The config of one paradigm with at most one decision (`factor`) changed to `value`."""

    paradigm: str
    factor: str
    value: str
    tree: Tree
    devices: int  # devices that train, without held-out ones

    @property
    def label(self) -> str:
        """The name of the variant in folders, such as "asynchronous-scale-local"."""
        if self.factor == BASE:
            return self.paradigm
        return f"{self.paradigm}-{self.factor}-{self.value}"

    def cell(self, seed: int) -> Cell:
        """The run of this variant with a seed."""
        return Cell(self.label, seed, {**self.tree, "seed": seed})


@dataclass(frozen=True)
class Plan:
    """All variants of a study, and the base value of every decision."""

    variants: tuple[Variant, ...]
    base: Mapping[str, str]  # factor -> value in the base runs
    rounds: int  # every run makes as many updates as this number of rounds
    devices: int
    strategy: str  # of the asynchronous base run

    def cells(self, seeds: Sequence[int]) -> list[Cell]:
        """All runs, seed by seed, so that an interrupted study has complete seeds."""
        return [variant.cell(seed) for seed in seeds for variant in self.variants]

    def find(self, paradigm: str, factor: str = BASE, value: str = "") -> Variant | None:
        """The variant with `factor` = `value`, or the base variant if that is the base value."""
        if self.base.get(factor) == value:
            factor, value = BASE, ""
        for variant in self.variants:
            if (variant.paradigm, variant.factor, variant.value) == (paradigm, factor, value):
                return variant
        return None

    def values(self, factor: str) -> list[str]:
        """All values of a factor, the base value first."""
        changed = [v.value for v in self.variants if v.factor == factor]
        return [self.base[factor], *dict.fromkeys(changed)] if changed else []

    @property
    def factors(self) -> list[str]:
        """The decisions that are changed."""
        return list(dict.fromkeys(v.factor for v in self.variants if v.factor != BASE))


@dataclass(frozen=True)
class _Decision:
    """A factor, the paradigms in which it is changed, its base value, and its other values."""

    factor: str
    paradigms: tuple[str, ...]
    base: str
    changes: Mapping[str, Tree]  # value -> config keys that it sets


def scenario(tree: Mapping[str, Any]) -> Tree:
    """The config of a single run: `tree` without the tables of studies and comparisons."""
    return {key: value for key, value in tree.items() if key not in ("study", "compare")}


def make_plan(tree: Mapping[str, Any], quick: bool = False) -> Plan:
    """The variants for the config `tree`; every invalid option raises BadInput here."""
    config = parse(tree)
    for key in config.study:
        if key != "har":
            hint = did_you_mean(key, ["har"])
            raise BadInput(f"unknown key 'study.{key}'{hint} (known here: har)")
    options = har_config(config.study.get("har", {}))
    if config.stop.epochs or config.stop.virtual_seconds:
        raise BadInput("study har: only stop.updates may be set, so that all runs are comparable")
    plain = scenario(tree)
    base = Experiment(parse(plain))
    if base.recipe.pooled or base.server().strategy.has_epochs:
        raise BadInput(
            f"strategy.name = {config.strategy.name!r}: the study needs an asynchronous strategy;"
            " it adds the centralised and synchronous runs"
        )
    devices = len(base.clients)
    rounds = max(1, base.config.stop.updates // devices)
    if quick:
        rounds = max(2, rounds // QUICK_DIVISOR)
    decisions = _decisions(options, base.config, quick)
    builder = _VariantBuilder(plain, options, rounds, base)
    variants = [builder.variant(paradigm, BASE, "", {}) for paradigm in PARADIGMS]
    for decision in decisions:
        variants += [
            builder.variant(paradigm, decision.factor, value, change)
            for value, change in decision.changes.items()
            if value != decision.base
            for paradigm in decision.paradigms
        ]
    base_values = {decision.factor: decision.base for decision in decisions}
    return Plan(tuple(variants), base_values, rounds, devices, config.strategy.name)


def har_config(table: Any) -> HarConfig:
    """The validated table `[study.har]`; an error names the key."""
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


def _decisions(options: HarConfig, config: Config, quick: bool) -> list[_Decision]:
    """The decisions with at least one value besides the base value in the resolved `config`."""
    base = config.training
    mixing = _mixing_option(config.strategy.name)
    share = config.strategy.options.get(mixing) if mixing else None
    decisions = [
        _Decision(
            "lr", PARADIGMS, f"{base.lr:g}", {f"{v:g}": {"training": {"lr": v}} for v in options.lr}
        ),
        _Decision(
            "batch_size",
            PARADIGMS,
            str(base.batch_size),
            {str(v): {"training": {"batch_size": v}} for v in options.batch_size},
        ),
        _Decision(
            "augment",
            PARADIGMS,
            config.data.augment,
            {v: {"data": {"augment": v}} for v in options.augment},
        ),
        _Decision(
            "scale",
            FEDERATED,
            config.data.scale,
            {v: {"data": {"scale": v}} for v in options.scale},
        ),
        _Decision("optimizer", FEDERATED, _optimizer(base.optimizer), _optimizers(options)),
        _Decision(
            "mixing",
            (ASYNCHRONOUS,),
            f"{share:g}" if share is not None else "-",
            {f"{v:g}": {"strategy": {mixing: v}} for v in options.mixing} if mixing else {},
        ),
        _Decision(
            "server_delay",
            (ASYNCHRONOUS,),
            f"{config.server.merge_seconds:g}",
            {
                f"{v:g}": {
                    "server": {"merge_seconds": v, "evaluate_seconds": EVALUATION_PER_MERGE * v}
                }
                for v in options.server_delay
            },
        ),
        _Decision(
            "strategy",
            (ASYNCHRONOUS,),
            config.strategy.name,
            {v: {"strategy": {"name": v}} for v in options.strategies},
        ),
        _Decision(BUSY, (ASYNCHRONOUS,), config.strategy.name, _busy(options, config)),
        _Decision(
            "test",
            FEDERATED,
            config.data.test,
            {v: {"data": {"test": v}} for v in options.test},
        ),
    ]
    if quick:
        decisions = [_only_last(decision) for decision in decisions]
    return [d for d in decisions if any(value != d.base for value in d.changes)]


def _busy(options: HarConfig, config: Config) -> dict[str, Tree]:
    """Further strategies with the slowest server: the effect of delay depends on the strategy."""
    slowest = max(options.server_delay, default=0.0)
    if slowest <= config.server.merge_seconds:
        return {}
    delay = {"merge_seconds": slowest, "evaluate_seconds": EVALUATION_PER_MERGE * slowest}
    return {v: {"strategy": {"name": v}, "server": delay} for v in options.strategies}


def _only_last(decision: _Decision) -> _Decision:
    """The decision with the last of its other values only."""
    others = [value for value in decision.changes if value != decision.base][-1:]
    return _Decision(
        decision.factor,
        decision.paradigms,
        decision.base,
        {value: decision.changes[value] for value in others},
    )


def _optimizer(name: str) -> str:
    return "sgd-m" if name == "sgd" else name


def _optimizers(options: HarConfig) -> dict[str, Tree]:
    """The optimisers with the base learning rate, and Adam with each of `adam_lr`."""
    changes: dict[str, Tree] = {
        _optimizer(name): {"training": {"optimizer": name}} for name in options.optimizer
    }
    if "adam" in options.optimizer:
        changes |= {
            f"adam {lr:g}": {"training": {"optimizer": "adam", "lr": lr}} for lr in options.adam_lr
        }
    return changes


def _mixing_option(strategy: str) -> str:
    """The strategy's option for the mixing ratio; empty if it has none."""
    options = signature(find_recipe(strategy).build).parameters
    return next((name for name in MIXING_OPTIONS if name in options), "")


class _VariantBuilder:
    """Builds validated variants of one scenario; loads data only for each kind of test set."""

    def __init__(self, plain: Tree, options: HarConfig, rounds: int, base: Experiment) -> None:
        self.plain, self.options, self.rounds, self.base = plain, options, rounds, base
        self._kernel = compiled_kernel(base.model)
        self._training = {base.config.data.test: len(base.clients)}  # test -> devices that train

    def variant(self, paradigm: str, factor: str, value: str, change: Mapping[str, Any]) -> Variant:
        """The variant of a paradigm in which the keys of `change` set `factor` to `value`."""
        tree = merged(self.plain, change)
        if paradigm == CENTRALISED:
            tree["strategy"] = {"name": "centralised"}
        elif paradigm == SYNCHRONOUS:
            tree["strategy"] = {"name": self.options.synchronous}
        elif factor in ("strategy", BUSY):
            tree["strategy"] = {"name": value}  # without the options of the base strategy
        config = parse(tree, f"study har, {paradigm} {factor} {value}".strip())
        recipe = find_recipe(config.strategy.name)
        strategy = recipe.make(resolve_options(recipe, config.strategy.options))
        if paradigm == SYNCHRONOUS and not strategy.has_epochs:
            raise BadInput(
                f"study.har.synchronous = {recipe.name!r}: must be a strategy with rounds"
            )
        devices = self._devices(config)
        # A centralised update passes over the data of all devices, like a round of all devices.
        each = 1 if paradigm == CENTRALISED else devices
        tree = merged(tree, {"stop": {"updates": self.rounds * each}, "evaluate": {"every": each}})
        if config.engine.kernel == "auto":
            # A study has enough runs to amortise compilation. Where the compiled kernel does not
            # apply, the plain one is faster than batching, because devices differ in data size.
            spec = strategy.prepare(TrainSpec(**config.training.model_dump()))
            fast = isinstance(self._kernel, CompiledKernel) and self._kernel.covers(spec)
            tree = merged(tree, {"engine": {"kernel": "compiled" if fast else "plain"}})
        return Variant(paradigm, factor, value, tree, devices)

    def _devices(self, config: Config) -> int:
        """The number of devices that train, without held-out ones."""
        test = config.data.test
        if test not in self._training:
            changed = self.base.config.data.model_copy(update={"test": test})
            other = Experiment(self.base.config.model_copy(update={"data": changed}))
            self._training[test] = len(other.clients)
        return self._training[test]
