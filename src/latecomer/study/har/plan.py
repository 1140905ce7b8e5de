"""The runs of the study: three paradigms, and variants with one decision changed at a time."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from latecomer.core.messages import TrainSpec
from latecomer.device.kernel import CompiledKernel, compiled_kernel
from latecomer.errors import BadInput
from latecomer.strategies.recipe import find_recipe, resolve_options
from latecomer.study.compare import Cell
from latecomer.study.config import Config, HarConfig, Tree, merged, parse
from latecomer.study.experiment import Experiment
from latecomer.study.metric_names import need_accuracy
from latecomer.study.summary import objective_summary

CENTRALISED, SYNCHRONOUS, ASYNCHRONOUS = "centralised", "synchronous", "asynchronous"
PARADIGMS = (CENTRALISED, SYNCHRONOUS, ASYNCHRONOUS)
FEDERATED = (SYNCHRONOUS, ASYNCHRONOUS)

BASE = "base"  # the factor of the unchanged runs
BUSY = "busy"  # the factor of runs with another strategy and a slow server
EVALUATION_PER_MERGE = 10  # ratio of server seconds per evaluation and merge (the paper: 10 s, 1 s)
QUICK_DIVISOR = 5  # a quick study makes this many times fewer updates
MIXING_OPTIONS = ("mixing", "alpha", "server_lr")  # names of the mixing ratio, by precedence


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

    def key(self, factor: str, value: str) -> tuple[str, str]:
        """Factor and value of the runs with `factor` = `value`: those of the base runs if equal."""
        return (BASE, "") if self.base.get(factor) == value else (factor, value)

    def find(self, paradigm: str, factor: str = BASE, value: str = "") -> Variant | None:
        """The variant with `factor` = `value`, or the base variant if that is the base value."""
        key = (paradigm, *self.key(factor, value))
        return next((v for v in self.variants if (v.paradigm, v.factor, v.value) == key), None)

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
    base: Any
    changes: Mapping[str, Tree]  # value -> config keys that it sets

    def without_base(self, quick: bool) -> "_Decision":
        """The same without the base value; with `quick`, only the last of the other values."""
        others = [value for value in self.changes if value != _text(self.base)]
        kept = others[-1:] if quick else others
        return replace(self, base=_text(self.base), changes={v: self.changes[v] for v in kept})


def scenario(tree: Mapping[str, Any]) -> Tree:
    """The config of a single run: `tree` without the tables of studies and comparisons."""
    return {key: value for key, value in tree.items() if key not in ("study", "compare")}


def make_plan(tree: Mapping[str, Any], quick: bool = False) -> Plan:
    """The variants for the config `tree`; every invalid option raises BadInput here."""
    config = parse(tree)
    options = config.study.har
    if config.stop.epochs or config.stop.virtual_seconds:
        raise BadInput("study har: only stop.updates may be set, so that all runs are comparable")
    plain = scenario(tree)
    base = Experiment(parse(plain))
    need_accuracy(objective_summary(base), "latecomer study har")
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
            for paradigm in decision.paradigms
        ]
    base_values = {decision.factor: decision.base for decision in decisions}
    return Plan(tuple(variants), base_values, rounds, devices, config.strategy.name)


def _decisions(options: HarConfig, config: Config, quick: bool) -> list[_Decision]:
    """The decisions with at least one value besides the base value in the resolved `config`."""
    data, training, strategy = config.data, config.training, config.strategy
    mixing = _mixing_option(strategy.name)
    delays = {_text(v): {"server": _server_delay(v)} for v in options.server_delay}
    names: dict[str, Tree] = {v: {"strategy": {"name": v}} for v in options.strategies}
    slowest = max(options.server_delay, default=0.0)
    # The effect of a delay depends on the strategy: the others are run with the slowest server too.
    busy = slowest > config.server.merge_seconds
    decisions = [
        _Decision("lr", PARADIGMS, training.lr, _changes("training", "lr", options.lr)),
        _Decision(
            "batch_size",
            PARADIGMS,
            training.batch_size,
            _changes("training", "batch_size", options.batch_size),
        ),
        _Decision("augment", PARADIGMS, data.augment, _changes("data", "augment", options.augment)),
        _Decision("scale", FEDERATED, data.scale, _changes("data", "scale", options.scale)),
        _Decision("optimizer", FEDERATED, _optimizer(training.optimizer), _optimizers(options)),
        _Decision(
            "mixing",
            (ASYNCHRONOUS,),
            strategy.options.get(mixing, "-"),
            _changes("strategy", mixing, options.mixing) if mixing else {},
        ),
        _Decision("server_delay", (ASYNCHRONOUS,), config.server.merge_seconds, delays),
        _Decision("strategy", (ASYNCHRONOUS,), strategy.name, names),
        _Decision(
            BUSY,
            (ASYNCHRONOUS,),
            strategy.name,
            {v: {**tree, "server": _server_delay(slowest)} for v, tree in names.items() if busy},
        ),
        _Decision("test", FEDERATED, data.test, _changes("data", "test", options.test)),
    ]
    return [d for decision in decisions if (d := decision.without_base(quick)).changes]


def _changes(table: str, key: str, values: Iterable[Any]) -> dict[str, Tree]:
    """Value as text -> the config that sets `table.key` to it."""
    return {_text(value): {table: {key: value}} for value in values}


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _server_delay(seconds: float) -> dict[str, float]:
    return {"merge_seconds": seconds, "evaluate_seconds": EVALUATION_PER_MERGE * seconds}


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
    options = find_recipe(strategy).options
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
