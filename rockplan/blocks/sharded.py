"""Sharded: blocks of which each process holds a part (`fully_shard`), and those that are planned
all the same.

takes: blocks. guarantees: within `gathered` their parameters are the whole ones that a forward
sees; every process has to come here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from rockplan.errors import UnsupportedModel
from rockplan.python_state.sharding import is_distributed, sharded_modules


@contextlib.contextmanager
def gathered(block: nn.Module) -> Iterator[None]:
    """The parameters of `block` are whole inside."""
    sharded = sharded_modules(block)
    for module in sharded:
        module.unshard()
    try:
        yield
    finally:
        for module in sharded:
            module.reshard()


def refuse_parts(block: nn.Module) -> None:
    """Raise UnsupportedModel where parameters are parts of others while the forward runs."""
    for name, parameter in block.named_parameters():
        if is_distributed(parameter):
            raise UnsupportedModel(
                f"the parameter '{name}' is a DTensor while the block runs, as "
                "parallelize_module (tensor parallel) makes it, whose operators exchange data "
                "between processes: no plan has these. Keep torch.utils.checkpoint for such "
                "blocks, or shard by fully_shard (data parallel), whose blocks are planned"
            )
