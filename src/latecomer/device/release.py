"""The single door through which anything leaves a device."""

from dataclasses import replace

from latecomer.core.messages import Update


def release(update: Update, private: bool = False) -> Update:
    """What the server may see of `update`.

    Everything a device sends passes here, so that privacy has one place to hold. A private
    device's ledger covers the noised delta and what was made of it; all else that tells of its
    data, such as a metric or a choice among models, stays at home.
    """
    return replace(update, metrics={}, choice=0) if private else update
