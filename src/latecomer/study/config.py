"""From TOML to a checked config. Every key has a default; an error names the key in one line."""

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeGuard, TypeVar

import tomli_w
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
)

from latecomer.errors import BadInput, did_you_mean
from latecomer.study.key_hints import key_hint


class Section(BaseModel):
    # Strict: `devices = true` or `lr = "0.1"` is a mistake, not a number.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


# A list in TOML, a tuple here: a config does not change.
T = TypeVar("T")
Several = Annotated[tuple[T, ...], Field(strict=False)]
Scale = Literal["global", "local", "none"]
Augment = Literal["none", "base", "balanced"]
Optimizer = Literal["sgd", "adam"]
OPTIMIZERS = ("sgd", "adam", "adamw", "rmsprop", "adagrad")
MAX_LR = 1e6  # far above any useful learning rate: a slip such as 1e30 is refused before a run
SCHEDULES = ("constant", "step", "cosine")  # of the learning rate


class DriftConfig(Section):
    """How data change during the run; times in nominal epochs of the fleet."""

    kind: Literal["none", "grow", "replace", "transition", "shift"] = "none"
    begin: float = Field(0.0, ge=0)
    over: float = Field(0.0, ge=0)
    first: float = Field(0.1, gt=0, le=1)
    rate: float = Field(1.0, gt=0)
    repeat: bool = False
    second: Literal["rotated", "relabelled", "source"] = "rotated"
    source: str = ""
    path: str = ""
    share: float = Field(0.5, ge=0, le=1)

    @property
    def renames(self) -> bool:
        """Whether labels change their meaning on some devices."""
        return self.kind == "shift" or (self.kind, self.second) == ("replace", "relabelled")


class DataConfig(Section):
    source: str = "digits"
    path: str = ""
    variant: str = ""
    sensors: Several[str] = ()
    label: str = ""
    activities: Several[int] = ()
    length: int = Field(0, ge=0)
    step: int = Field(0, ge=0)
    target: str | Several[str] = "label"
    subject: str = ""
    columns: Several[str] = ()
    ignore: Several[str] = ()
    size: int = Field(0, ge=0)
    min_examples: int = Field(0, ge=0)
    partition: Literal["iid", "dirichlet", "one-class", "by-subject", "time-window"] = "dirichlet"
    alpha: float = Field(0.1, gt=0)
    window: int = Field(0, ge=0)
    per_device: int = Field(0, ge=0)
    test: Literal["fair", "held-out-clients", "official"] = "fair"
    scale: Scale = "global"
    augment: Augment = "none"
    replicas: dict[str, Annotated[int, Field(ge=0)]] = {}
    validation: float = Field(0.16, ge=0, lt=0.8)
    drift: DriftConfig = DriftConfig()


class GammaDelay(Section):
    gamma: float = Field(gt=0)


class LateConfig(Section):
    """Which devices are late, and by how many epochs; with a delay of 0 none is.

    With `only`, no other device has examples of the classes.
    """

    classes: Several[int] = ()
    devices: int = Field(10, ge=0)
    delay: Annotated[float, Field(ge=0)] | GammaDelay = 0.0
    kind: Literal["in-flight", "busy"] = "in-flight"
    only: bool = False

    @field_validator("delay", mode="wrap")
    @classmethod
    def _names_both_forms(cls, value: Any, check: ValidatorFunctionWrapHandler) -> Any:
        try:
            return check(value)
        except ValidationError:
            raise ValueError(
                "must be 0 or more epochs, or {gamma = 10} for a Gamma of mean 10"
            ) from None


class AppConfig(Section):
    """A Flower app whose unchanged ClientApp trains the devices; off without `path`.

    path: the folder with its pyproject.toml. initial: module:callable that returns the initial
    arrays; by default the ServerApp is run up to its first message. config: changes of the run
    config. node: keys of the node config of every device, besides partition-id and num-partitions.
    passes: passes over its examples that a task takes, for its time; 0: the run config's
    local-epochs, or 1. examples: of each device; empty: as its first task reports. metric: the main
    one; empty: the first that is an accuracy, F1 or AUC, or else the first.
    """

    path: str = ""
    initial: str = ""
    config: dict[str, Any] = {}
    node: dict[str, bool | int | float | str] = {}
    passes: int = Field(0, ge=0)
    examples: Several[Annotated[int, Field(ge=0)]] = ()
    metric: str = ""


class FleetConfig(Section):
    """The preset, and values that replace the preset's own on every device."""

    devices: int = Field(100, ge=1)
    profile: str = "uniform"
    path: str = ""
    late: LateConfig = LateConfig()
    seconds_per_example: float | None = Field(None, ge=0)
    seconds_per_task: float | None = Field(None, ge=0)
    down: float | None = Field(None, gt=0, allow_inf_nan=True)
    up: float | None = Field(None, gt=0, allow_inf_nan=True)
    latency: float | None = Field(None, ge=0)
    jitter: float | None = Field(None, ge=0)
    dropout: float | None = Field(None, ge=0, le=1)
    crash: float | None = Field(None, ge=0, le=1)


class ModelConfig(Section):
    name: str = "mlp"
    hidden: Several[int] = (64, 32)
    buffers: Literal["average", "local"] = "average"

    @field_validator("hidden")
    @classmethod
    def _widths_are_positive(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if any(width < 1 for width in value):
            raise ValueError("every width must be 1 or more")
        return value


class TrainingConfig(Section):
    local_epochs: int = Field(2, ge=1)
    batch_size: int = Field(32, ge=1)
    lr: float = Field(0.01, gt=0, le=MAX_LR)
    momentum: float = Field(0.5, ge=0, lt=1)
    optimizer: str = "sgd"
    prox: float = Field(0.0, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    clip: float = Field(0.0, ge=0)
    local_steps: int = Field(0, ge=0)
    schedule: str = "constant"
    schedule_versions: int = Field(0, ge=0)
    schedule_factor: float = Field(0.1, ge=0, le=1)
    function: str = ""

    @field_validator("optimizer")
    @classmethod
    def _is_an_optimizer(cls, value: str) -> str:
        return _known_or_own(value, OPTIMIZERS)

    @field_validator("schedule")
    @classmethod
    def _is_a_schedule(cls, value: str) -> str:
        return _known_or_own(value, SCHEDULES)


def _known_or_own(value: str, known: Iterable[str]) -> str:
    """`value`, if it is a known name or a module:callable; ValueError otherwise."""
    known = tuple(known)
    if value not in known and ":" not in value:
        hint = did_you_mean(value, known)
        raise ValueError(f"must be one of {', '.join(known)}, or your own module:callable{hint}")
    return value


class ObjectiveConfig(Section):
    """The loss and further metrics; the kind of targets follows from the loss and the data."""

    loss: str = "cross-entropy"
    metrics: Several[str] = ()
    kind: Literal["auto", "classes", "tokens", "multi-label", "regression", "own"] = "auto"


class StrategyConfig(BaseModel):
    """The name; everything else in this table is an option of that strategy."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str = "latecomer"

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class PrivacyConfig(Section):
    """Local differential privacy; epsilon 0 switches it off.

    mode = "per-step": epsilon and delta of one release; "whole-run": of all releases that a device
    makes in `tasks` tasks (0: as many as the run's bounds let the average device do).
    """

    epsilon: float = Field(0.0, ge=0)
    delta: float = Field(1e-5, gt=0, lt=1)
    clip: float = Field(1.0, gt=0)
    mode: Literal["per-step", "whole-run"] = "per-step"
    where: Literal["step", "update"] = "step"
    noise: Literal["gaussian", "laplace"] = "gaussian"
    sampling: Literal["shuffle", "poisson"] = "shuffle"
    denominator: Literal["batch", "dataset"] = "batch"
    accountant: Literal["pld", "rdp"] = "pld"
    budget: float = Field(0.0, ge=0)
    tasks: int = Field(0, ge=0)


class SubmodelsConfig(Section):
    """Which share of the hidden channels devices train; "auto": as the strategy is meant for.

    level = "declared": by the speed of their hardware, in proportion to `shares`; "measured": by
    how long their tasks take.
    """

    level: Literal["auto", "none", "declared", "measured"] = "auto"
    widths: Several[float] = (1.0, 0.75, 0.5, 0.25)
    shares: Several[float] = ()
    slack: float = Field(1.0, gt=0)


class ServerConfig(Section):
    """Virtual seconds of the server's work, and the protection against hostile updates.

    `norm_ratio`: largest norm of an update, over the median over devices; 0 = no bound.
    `most_refused`: what follows the roll-back if most devices' updates are refused.
    """

    merge_seconds: float = Field(0.0, ge=0)
    evaluate_seconds: float = Field(0.0, ge=0)
    compensate_seconds: float = Field(0.0, ge=0)
    norm_ratio: float = Field(20.0, ge=0)
    most_refused: Literal["continue", "stop"] = "continue"


class AttackConfig(Section):
    """Hostile devices of a simulation (`engines.attack`); none with a share of 0.

    devices: share of the devices with data, chosen by the seed. begin: client updates that are
    accepted before the first hostile task is sent.
    """

    kind: Literal[
        "none", "sign-flip", "scale", "noise", "label-flip", "free-rider", "claim-examples"
    ] = "none"
    devices: float = Field(0.0, ge=0, le=1)
    strength: float = Field(10.0, gt=0, le=1e12)
    begin: int = Field(0, ge=0)


class EngineConfig(Section):
    """How local training is computed: the kernel, memory for a batch of tasks, torch device."""

    kernel: Literal["auto", "plain", "batched", "compiled"] = "auto"
    memory_mb: float = Field(512.0, gt=0)
    device: str = "auto"


class PersonaliseConfig(Section):
    """How devices use the model, with any strategy; it changes local test accuracy only."""

    prior: bool = False
    finetune_epochs: int = Field(0, ge=0, le=100)


class StopConfig(Section):
    updates: int = Field(0, ge=0)
    epochs: int = Field(0, ge=0)
    virtual_seconds: float = Field(0.0, ge=0)
    patience: int = Field(0, ge=0)


class EvaluateConfig(Section):
    every: int = Field(0, ge=0)
    examples: int = Field(0, ge=0)
    clients: bool = False  # also compute local test accuracy at every evaluation


class CheckpointConfig(Section):
    """Updates between checkpoints; 0: one every `seconds` of wall time."""

    every: int = Field(0, ge=0)
    seconds: float = Field(20.0, gt=0)


class LogConfig(Section):
    """Further sinks for the metrics of a run."""

    sinks: Several[Literal["tensorboard", "mlflow", "wandb"]] = ()


Positive = Annotated[float, Field(gt=0)]


class HarConfig(Section):
    """`[study.har]`: the values of each decision; an empty list omits the decision."""

    synchronous: str = "fedavg"  # the strategy of synchronous runs
    batch_size: Several[Annotated[int, Field(ge=1)]] = (32, 128)
    lr: Several[Positive] = (0.001, 0.01, 0.1)
    augment: Several[Augment] = ("none", "base", "balanced")
    scale: Several[Scale] = ("global", "local")
    optimizer: Several[Optimizer] = ("sgd", "adam")
    adam_lr: Several[Positive] = (0.001,)  # further learning rates for Adam
    mixing: Several[Positive] = (0.2, 0.4, 0.8)
    server_delay: Several[Annotated[float, Field(ge=0)]] = (0.0, 1.0)  # seconds per merge
    strategies: Several[str] = ("async-share", "fedasync")  # further asynchronous strategies
    test: Several[Literal["fair", "held-out-clients"]] = ("fair", "held-out-clients")


class StudyConfig(Section):
    """The tables of `latecomer study`; single runs do not use them."""

    har: HarConfig = HarConfig()


# What a Flower app has itself.
OF_DATA = ("data", "model", "objective", "training", "submodels", "privacy", "personalise")


class Config(Section):
    seed: int = Field(1, ge=0)
    app: AppConfig = AppConfig()
    data: DataConfig = DataConfig()
    fleet: FleetConfig = FleetConfig()
    model: ModelConfig = ModelConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    training: TrainingConfig = TrainingConfig()
    strategy: StrategyConfig = StrategyConfig()
    submodels: SubmodelsConfig = SubmodelsConfig()
    privacy: PrivacyConfig = PrivacyConfig()
    personalise: PersonaliseConfig = PersonaliseConfig()
    server: ServerConfig = ServerConfig()
    attack: AttackConfig = AttackConfig()
    engine: EngineConfig = EngineConfig()
    stop: StopConfig = StopConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    compare: dict[str, dict[str, Any]] = {}
    study: StudyConfig = StudyConfig()

    def to_toml(self) -> str:
        unused = {"study"} if self.study == StudyConfig() else set()
        # Sections that are the app's, or that no app is there for.
        unused |= set(OF_DATA) if self.app.path else {"app"}
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True, exclude=unused))


Tree = dict[str, Any]


APP_DEVICES = 10  # of an app that is run without a config, as in Flower's simulation


def read_toml(path: Path) -> Tree:
    """The config in a file; for the folder of a Flower app one that runs it."""
    if path.is_dir():
        return {"app": {"path": str(path)}, "fleet": {"devices": APP_DEVICES}}
    if path.name == "pyproject.toml":
        raise BadInput(f"{path}: not a config; for a Flower app give its folder, {path.parent}")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"{path}: no such config file{nearby(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{path}: not valid TOML: {error}") from error
    except RecursionError:
        raise BadInput(f"{path}: not valid TOML: nested too deep") from None


def nearby(path: Path) -> str:
    """A hint at a TOML file or folder beside `path` with a similar name; empty if there is none."""
    try:
        there = [each for each in path.parent.iterdir() if each.suffix == ".toml" or each.is_dir()]
    except OSError:
        return ""
    hint = did_you_mean(path.stem, [each.stem for each in there])
    return did_you_mean(path.name, [each.name for each in there]) if hint else ""


def with_settings(tree: Mapping[str, Any], settings: Sequence[str]) -> Tree:
    """`tree` with each `a.b=value` put in; the value is TOML, a bare word is a string.

    `strategy=NAME` is short for `strategy.name=NAME`. Errors in a setting raise here; errors in
    `tree` are left to `parse`.
    """
    result, given = _copy(tree), {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            raise BadInput(f"--set {setting!r}: must look like a.b=value")
        value = toml_value(text.strip())
        if parts == ["strategy"] and isinstance(value, str):
            parts = ["strategy", "name"]
        _put(result, parts, value, setting)
        given[".".join(parts)] = setting
    try:
        Config.model_validate(result)
    except ValidationError as error:
        key, line = _one_line(error)
        if key in given:
            raise BadInput(f"--set {given[key]!r}: {line}") from error
    return result


def merged(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> Tree:
    """`tree` updated with `changes`, table by table."""
    result = _copy(tree)
    for key, value in changes.items():
        old = result.get(key)
        if isinstance(old, dict) and isinstance(value, Mapping):
            result[key] = merged(old, value)
        else:
            result[key] = value
    return result


def parse(tree: Mapping[str, Any], where: str = "config") -> Config:
    """A checked config; BadInput names the first error in one line."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise BadInput(f"{where}: {_one_line(error)[1]}") from error


def load_config(path: Path, settings: Sequence[str] = ()) -> Config:
    return parse(with_settings(read_toml(path), settings), str(path))


def quickstart() -> Tree:
    """The config behind `latecomer run` without a file."""
    return read_toml(Path(__file__).with_name("quickstart.toml"))


def _copy(tree: Mapping[str, Any]) -> Tree:
    return {k: _copy(v) if isinstance(v, Mapping) else v for k, v in tree.items()}


def _put(tree: Tree, parts: Sequence[str], value: Any, setting: str) -> None:
    for part in parts[:-1]:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            raise BadInput(f"--set {setting!r}: {part!r} is a value, not a table")
    tree[parts[-1]] = value


def toml_value(text: str) -> Any:
    """The TOML value in a text; a text that is no TOML is itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


# Pydantic's names of types, in TOML's terms.
PLAINLY = {
    "tuple_type": "must be a list, as in [1, 2]",
    "bool_type": "must be true or false",
    "int_type": "must be an integer",
    "string_type": "must be text",
    "float_type": "must be a number",
}


def _one_line(error: ValidationError) -> tuple[str, str]:
    """The key and the reason of the first error."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    if first["type"] == "extra_forbidden":
        known, key = _fields_at(path[:-1]), ".".join(path)
        everywhere = [each for each in _all_keys(Config) if not each.startswith("study.")]
        hint = key_hint(key, known, everywhere)
        return key, f"unknown key {key!r}{hint} (known here: {', '.join(known)})"
    message = PLAINLY.get(first["type"]) or first["msg"].removeprefix("Value error, ")
    message = message.replace("Input should be", "must be", 1)
    if first["type"] == "model_type":
        message = f"must be a table of keys, such as {_key(path)}.{_fields_at(path)[0]}"
    return _key(path), f"{_key(path)} = {first['input']!r}: {message}"


def _all_keys(section: type[BaseModel], table: str = "") -> Iterator[str]:
    """Every key of the section and of the tables in it, with the names of the tables."""
    for name, field in section.model_fields.items():
        if _is_table(field.annotation):
            yield from _all_keys(field.annotation, f"{table}{name}.")
        else:
            yield f"{table}{name}"


def _is_table(annotation: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _key(path: Sequence[str]) -> str:
    """The config key of an error's path, without what pydantic adds to it."""
    fields = set(Config.model_fields)
    key: list[str] = []
    for part in path:
        if key and part not in fields and not part.isdigit():
            break
        key.append(part)
        fields = set(_fields_at(key))
    return ".".join(key)


def _fields_at(path: Sequence[str]) -> list[str]:
    section: type[BaseModel] = Config
    for part in path:
        field = section.model_fields.get(part)
        if field is None or not _is_table(field.annotation):
            return []
        section = field.annotation
    return list(section.model_fields)
