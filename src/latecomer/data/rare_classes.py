"""Leaving out classes that are too rare to say anything about."""

from dataclasses import replace

import numpy as np

from latecomer.data.dataset import Dataset


def drop_rare_classes(dataset: Dataset, least: int) -> Dataset:
    """The dataset without classes of fewer than `least` examples, and a note of what is gone."""
    counts = np.bincount(dataset.y, minlength=dataset.num_classes)
    kept = np.flatnonzero(counts >= least)
    if len(kept) == dataset.num_classes:
        return dataset
    rows = np.isin(dataset.y, kept)
    gone = [f"{dataset.class_names[c]} ({counts[c]})" for c in np.flatnonzero(counts < least)]
    return replace(
        dataset,
        x=dataset.x[rows],
        y=np.searchsorted(kept, dataset.y[rows]),
        subject=None if dataset.subject is None else dataset.subject[rows],
        test=None if dataset.test is None else dataset.test[rows],
        class_names=tuple(dataset.class_names[c] for c in kept),
        notes=(
            *dataset.notes,
            f"classes of fewer than {least} examples are dropped: {', '.join(gone)}",
        ),
        where=f"data.min_examples = {least}",
    )
