"""Hints for keys that the config does not have: names of other libraries, and other tables."""

from collections.abc import Sequence

from latecomer.errors import did_you_mean

# Names that people know from elsewhere -> the keys here. A name with a dot is a whole key.
OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "algorithm": ("strategy.name",),
    "batch": ("training.batch_size",),
    "clients": ("fleet.devices",),
    "cuda": ("engine.device",),
    "data.name": ("data.source",),
    "dataset": ("data.source",),
    "devices": ("fleet.devices",),
    "epochs": ("training.local_epochs", "stop.epochs"),
    "eta": ("training.lr",),
    "gpu": ("engine.device",),
    "learning_rate": ("training.lr",),
    "model.type": ("model.name",),
    "num_clients": ("fleet.devices",),
    "num_devices": ("fleet.devices",),
    "num_epochs": ("training.local_epochs", "stop.epochs"),
    "num_rounds": ("stop.epochs", "stop.updates"),
    "rounds": ("stop.epochs", "stop.updates"),
    "users": ("fleet.devices",),
}


def key_hint(key: str, here: Sequence[str], everywhere: Sequence[str]) -> str:
    """A hint to append to "unknown key"; empty if no key is like it.

    `here` are the keys of the same table, `everywhere` all keys of the config with their tables.
    """
    name = key.rpartition(".")[2]
    plain = name.lower().replace("-", "_")
    meant = OTHER_NAMES.get(key) or OTHER_NAMES.get(plain, ())
    if not meant:
        if near := did_you_mean(name, here):
            return near
        meant = tuple(each for each in everywhere if each.endswith(f".{plain}"))[:3]
    return f"; did you mean {' or '.join(map(repr, meant))}?" if meant else ""
