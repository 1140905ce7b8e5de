"""The examples of every device: loaded, split over devices, and as functions of virtual time."""

from dataclasses import fields
from functools import cached_property

from latecomer.data.dataset import Dataset, SourceOptions, drop_rare_classes, need_classes
from latecomer.data.drift import ClientDataStreams, Drift, client_data_streams, concatenate_streams
from latecomer.data.exclusive_classes import ExclusiveClasses
from latecomer.data.federated_dataset import Examples, FederatedDataset, federate
from latecomer.data.given import from_objects, load_given
from latecomer.data.sources import load_dataset
from latecomer.data.stored import StoredInputs
from latecomer.device.models import MODELS
from latecomer.errors import BadInput
from latecomer.fleet.late import choose_late
from latecomer.study.config import Config, DataConfig, DriftConfig
from latecomer.study.given import GIVEN, Given, check_reference
from latecomer.study.objectives import with_targets

TEST_SHARE = 0.2  # of a device's examples, after its training and validation parts


def read_data(config: Config, given: Given) -> tuple[Dataset, Config, str]:
    """The data given in Python, or of `data.source`; the config; and a fingerprint if given.

    The config has the partition and the test set that are part of the data: by-subject for one
    dataset per device, official for a central test set.
    """
    data = config.data
    if config.app.path:
        raise BadInput(f"app.path = {config.app.path!r}: the data of a Flower app are its own")
    if given.data is None and ":" not in data.source:
        dataset = load_dataset(data.source, data.path, source_options(data))
        return _prepared(config, dataset, given.loss is not None), config, ""
    if given.data is None:
        check_reference("data.source", data.source)
        found = load_given(data.source, source_options(data), data.path, config.seed)
    else:
        found = from_objects(given.data, source_options(data))
    update = {
        "source": data.source if given.data is None else f"{GIVEN}data",
        "partition": found.partition or data.partition,
        "test": found.test or data.test,
    }
    config = config.model_copy(update={"data": data.model_copy(update=update)})
    fingerprint = "" if given.data is None else found.fingerprint()
    return _prepared(config, found.dataset, given.loss is not None), config, fingerprint


def _prepared(config: Config, dataset: Dataset, own_loss: bool) -> Dataset:
    """The dataset with the types that model and objective need, without rare classes.

    `own_loss`: the loss was given in Python, whatever `objective.loss` says.
    """
    if config.model.name in MODELS:  # they take numbers; integers may be tokens for other models
        dataset = dataset.with_float_inputs()
    dataset = with_targets(dataset, config.objective, own_loss)
    dataset = drop_rare_classes(dataset, config.data.min_examples)
    _check_classes(config, dataset)
    return dataset


def load_federated(config: Config, dataset: Dataset) -> FederatedDataset:
    """The dataset, split over devices into training, validation and test parts."""
    data = config.data
    return federate(
        dataset,
        partition=data.partition,
        devices=config.fleet.devices,
        alpha=data.alpha,
        test=data.test,
        scale=data.scale,
        augment=data.augment,
        split=(1 - TEST_SHARE - data.validation, data.validation, TEST_SHARE),
        per_device=data.per_device,
        window=data.window,
        replicas=data.replicas,
        second_domain=second_domain(data.drift),
        exclusive=_exclusive_classes(config, dataset),
        seed=config.seed,
    )


def late_devices(config: Config, federation: FederatedDataset) -> tuple[int, ...]:
    """The devices of `fleet.late`, in ascending order; none without a delay."""
    late = config.fleet.late
    if not late.delay:
        return ()
    if federation.holders:
        return federation.holders
    counts = federation.class_counts().numpy()
    return choose_late(counts, late.classes, late.devices, config.seed)


def source_options(data: DataConfig) -> SourceOptions:
    """The keys of `[data]` that only the source reads."""
    return SourceOptions(**{f.name: getattr(data, f.name) for f in fields(SourceOptions)})


def second_domain(drift: DriftConfig) -> Dataset | None:
    """The dataset that replaces the first during the run, if it comes from a source."""
    if drift.kind == "replace" and drift.second == "source":
        if not drift.source:
            raise BadInput("data.drift.second = 'source': name it with data.drift.source")
        return load_dataset(drift.source, drift.path)
    if drift.source or drift.path:
        raise BadInput(
            "data.drift.source and data.drift.path are for kind = 'replace' and second = 'source'"
        )
    return None


def drift_in_seconds(drift: DriftConfig, epoch_seconds: float) -> Drift | None:
    """The drift with its nominal epochs as virtual seconds; None without drift."""
    if drift.kind == "none":
        return None
    if not epoch_seconds:
        raise BadInput("data.drift: epochs take no time on this fleet; give its tasks a cost")
    begin, over = drift.begin * epoch_seconds, drift.over * epoch_seconds
    return Drift(
        kind=drift.kind,
        begin=begin,
        end=begin + over,
        first=drift.first,
        per_second=drift.rate / epoch_seconds,
        repeat=drift.repeat,
        second=drift.second,
        share=drift.share,
    )


def _check_classes(config: Config, dataset: Dataset) -> None:
    drift = config.data.drift
    if drift.kind != "none" and isinstance(dataset.x, StoredInputs):
        raise BadInput(
            f"data.drift.kind = {drift.kind!r}: the inputs are stored outside memory; allowed with"
            " them is 'none'"
        )
    if drift.renames:
        need_classes(dataset.y, f"data.drift.kind = {drift.kind!r}", "choose another drift")
    if config.fleet.late.classes:
        need_classes(dataset.y, "fleet.late.classes", "leave it empty")
    for label in config.fleet.late.classes:
        if not 0 <= label < dataset.num_classes:
            known = ", ".join(f"{i} = {name}" for i, name in enumerate(dataset.class_names[:12]))
            raise BadInput(
                f"fleet.late.classes: {label} is no class of {config.data.source}"
                f" (0 to {dataset.num_classes - 1}: {known})"
            )


def _exclusive_classes(config: Config, dataset: Dataset) -> ExclusiveClasses | None:
    late = config.fleet.late
    if not late.only:
        return None
    if not late.classes:
        raise BadInput("fleet.late.only = true: needs fleet.late.classes, e.g. [3]; it is empty")
    if not late.devices:
        raise BadInput("fleet.late.only = true: needs fleet.late.devices of 1 or more; it is 0")
    if len({*late.classes}) == dataset.num_classes:
        raise BadInput("fleet.late.only = true: fleet.late.classes must leave others a class")
    if config.data.drift.renames:
        raise BadInput("fleet.late.only = true: data.drift would give others the class by renaming")
    return ExclusiveClasses(
        late.classes,
        lambda counts: choose_late(counts, late.classes, late.devices, config.seed),
    )


class LocalData:
    """Each device's training and test examples, and the central test set, at a virtual time."""

    def __init__(
        self, federation: FederatedDataset, drift: Drift | None, official_test: bool, seed: int
    ) -> None:
        self.federation, self.drift, self.official_test = federation, drift, official_test
        self._seed = seed

    @cached_property
    def streams(self) -> tuple[ClientDataStreams, ...]:
        """The devices' data over time; empty without drift."""
        if self.drift is None:
            return ()
        return client_data_streams(self.federation, self.drift, self._seed)

    def test_of(self, device: int, time: float = 0.0) -> Examples:
        """The device's local test set."""
        if self.streams:
            return self.streams[device].test(time)
        return self.federation.clients[device].test

    def train_of(self, device: int, time: float = 0.0) -> Examples:
        """The device's training examples."""
        if self.streams:
            return self.streams[device].train(time)
        return self.federation.clients[device].train

    def central_test(self, time: float = 0.0) -> Examples:
        """The test set of the server: the devices' test parts, or fixed official rows."""
        if not self.streams or self.official_test:
            return self.federation.test
        devices = self.federation.held_out or range(len(self.streams))
        return concatenate_streams([self.streams[device].test for device in devices])(time)

    def validation(self, time: float = 0.0) -> Examples:
        """The devices' validation parts, which early stopping uses."""
        if not self.streams:
            return self.federation.validation
        return concatenate_streams([each.validation for each in self.streams])(time)
