"""The last step before an update leaves a device, where privacy removes what is not noised."""

from dataclasses import replace

from latecomer.core.messages import Update


def release(update: Update, private: bool = False) -> Update:
    """The update as it is sent; every update of a device passes through here.

    The ledger of a private device covers the noised delta and functions of it. Metrics and the
    choice among models depend on the data un-noised and are removed.
    """
    return replace(update, metrics={}, choice=0) if private else update
