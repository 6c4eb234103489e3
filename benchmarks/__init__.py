"""Benchmarks, and the models that they share with the tests."""
