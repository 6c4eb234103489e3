"""On each of two processes: log-probabilities of tokens by a head that `fully_shard` shares."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rockplan


class Policy(nn.Module):
    def __init__(self, by_logits: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.Linear(16, 16), nn.Linear(16, 1000)
        self.by_logits = by_logits

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        hidden = self.layer(x).tanh()
        if self.by_logits:
            found = self.head(hidden).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
        else:
            found = rockplan.token_log_probs(hidden, self.head.weight, ids, bias=self.head.bias)
        return -found.mean()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(dist.get_rank())
    x, ids = torch.randn(12, 16), torch.randint(1000, (12,))
    models = [fully_shard(Policy(by_logits), mesh=mesh) for by_logits in (True, False)]
    for model in models:
        model(x, ids).backward()
    for one, other in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(one.grad.to_local(), other.grad.to_local(), rtol=1e-5, atol=1e-6)

    weight = models[1].head.weight
    try:
        rockplan.token_log_probs(x, weight, ids)
    except rockplan.InvalidInput as error:
        assert "inside of the forward" in str(error)
    else:
        raise AssertionError
    weight.requires_grad_(False)
    whole = rockplan.token_log_probs(x, weight.full_tensor(), ids)
    assert torch.equal(rockplan.token_log_probs(x, weight, ids), whole)
    dist.barrier()
    dist.destroy_process_group()
