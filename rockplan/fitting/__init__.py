"""Whether a training step fits on a device: tables of devices, a model of the caching allocator."""
