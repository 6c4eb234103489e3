"""Whether training fits on a device: captures at several sizes, the largest batches, the answer."""
