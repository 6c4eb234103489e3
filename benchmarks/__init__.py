"""Benchmarks, and the models that they share with the tests."""

import sys
import types

# torchvision (timm and image models of transformers import it) registers fake kernels for
# compiled operators that do not load beside a CPU build of torch, and then cannot be imported.
sys.modules.setdefault(
    "torchvision._meta_registrations", types.ModuleType("torchvision._meta_registrations")
)
