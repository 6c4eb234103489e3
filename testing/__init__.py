"""What tests and benchmarks share, which imports neither: models and graphs, drawn or made by hand,
exhaustive searches, and training beside eager."""

import sys
import types

# torchvision (timm and image models of transformers import it) registers fake kernels for
# compiled operators that do not load beside a CPU build of torch, and then cannot be imported.
sys.modules.setdefault(
    "torchvision._meta_registrations", types.ModuleType("torchvision._meta_registrations")
)
