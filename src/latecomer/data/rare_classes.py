"""Removal of classes with too few examples (`data.min_examples`)."""

from dataclasses import replace

import numpy as np

from latecomer.data.dataset import Dataset


def drop_rare_classes(dataset: Dataset, min_examples: int) -> Dataset:
    """The dataset without classes of fewer than `min_examples` examples; a note names them."""
    counts = np.bincount(dataset.y, minlength=dataset.num_classes)
    kept = np.flatnonzero(counts >= min_examples)
    if len(kept) == dataset.num_classes:
        return dataset
    rows = np.isin(dataset.y, kept)
    dropped = np.flatnonzero(counts < min_examples)
    names = ", ".join(f"{dataset.class_names[c]} ({counts[c]})" for c in dropped)
    return replace(
        dataset,
        x=dataset.x[rows],
        y=np.searchsorted(kept, dataset.y[rows]),
        subject=None if dataset.subject is None else dataset.subject[rows],
        test=None if dataset.test is None else dataset.test[rows],
        class_names=tuple(dataset.class_names[c] for c in kept),
        notes=(
            *dataset.notes,
            f"classes of fewer than {min_examples} examples are dropped: {names}",
        ),
        where=f"data.min_examples = {min_examples}",
    )
