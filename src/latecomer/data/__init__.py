"""Data sources, partition over devices, splits, scaling, augmentation and drift."""
