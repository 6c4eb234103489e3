"""Graphs, differential equations, spikes, state spaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from testing.library_cases.building import BUILDERS, Built, Wrapped, case, ids

# Graphs


def _graph() -> tuple[Tensor, Tensor]:
    return torch.randn(12, 8), torch.randint(0, 12, (2, 40))


def _convolutions(name: str, *sizes: Any, **settings: Any) -> Callable[[], Built]:
    def build() -> Built:
        import torch_geometric.nn as geometric

        kind = getattr(geometric, name)
        layers = nn.ModuleList([kind(8, *sizes, **settings), kind(8, *sizes, **settings)])

        def run(layers: Any, x: Tensor, edges: Tensor) -> Tensor:
            for layer in layers:
                x = layer(x, edges).relu()
            return x

        return Built(Wrapped(layers, run), _graph())

    return build


BUILDERS |= {
    "torch_geometric/GCNConv": _convolutions("GCNConv", 8),
    "torch_geometric/GCNConv cached": _convolutions("GCNConv", 8, cached=True),
    "torch_geometric/GATv2Conv": _convolutions("GATv2Conv", 4, heads=2, dropout=0.2),
    "torch_geometric/SAGEConv": _convolutions("SAGEConv", 8, aggr="max"),
    "torch_geometric/TransformerConv": _convolutions("TransformerConv", 4, heads=2),
    "torch_geometric/ChebConv": _convolutions("ChebConv", 8, K=3),
}


@case("torch_geometric/GIN with pooling")
def _gin() -> Built:
    from torch_geometric.nn import GIN, global_add_pool

    def run(gin: Any, x: Tensor, edges: Tensor, batch: Tensor) -> Tensor:
        return global_add_pool(gin(x, edges), batch)

    model = GIN(8, 16, num_layers=3, out_channels=4, dropout=0.1, norm="batch_norm")
    return Built(Wrapped(model, run), (*_graph(), torch.arange(12) // 4))


@case("torch_geometric/VGAE")
def _vgae() -> Built:
    from torch_geometric.nn import VGAE, GCNConv

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.mean, self.spread = GCNConv(8, 16), GCNConv(16, 4), GCNConv(16, 4)

        def forward(self, x: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
            h = self.first(x, edges).relu()
            return self.mean(h, edges), self.spread(h, edges)

    def run(model: Any, x: Tensor, edges: Tensor) -> Tensor:
        z = model.encode(x, edges)
        return model.recon_loss(z, edges) + model.kl_loss()

    return Built(Wrapped(VGAE(Encoder()), run), _graph())


@case("torch_geometric/SchNet")
def _schnet() -> Built:
    from torch_geometric.nn.models import SchNet

    model = SchNet(hidden_channels=16, num_filters=16, num_interactions=2, num_gaussians=8)
    model.interaction_graph = _AllPairs()
    return Built(model, (ids(6, below=9), torch.randn(6, 3), torch.zeros(6, dtype=torch.long)))


class _AllPairs(nn.Module):
    """Every two atoms (those within a distance are found by a package of its own)."""

    def forward(self, positions: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        count = len(positions)
        rows = torch.arange(count).repeat_interleave(count)
        columns = torch.arange(count).repeat(count)
        edges = torch.stack([rows[rows != columns], columns[rows != columns]])
        return edges, (positions[edges[0]] - positions[edges[1]]).norm(dim=-1)


@case("egnn-pytorch/EGNN_Network")
def _egnn() -> Built:
    from egnn_pytorch import EGNN_Network

    model = EGNN_Network(num_tokens=9, num_positions=12, dim=16, depth=2, num_nearest_neighbors=0)
    return Built(model, (ids(2, 6, below=9), torch.randn(2, 6, 3)))


@case("torchani/ANI1x")
def _ani() -> Built:
    from torchani.arch import simple_ani

    model = simple_ani(("H", "C"), lot="wb97x-631gd")
    return Built(model, ((torch.tensor([[6, 1, 1, 1, 1]]), torch.randn(1, 5, 3)),))


@case("e3nn/convolution")
def _e3nn() -> Built:
    from e3nn import o3
    from e3nn.nn import FullyConnectedNet

    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inner = o3.Irreps("4x0e + 2x1o")
            self.around = o3.Irreps.spherical_harmonics(2)
            self.product = o3.FullyConnectedTensorProduct(
                inner, self.around, inner, shared_weights=False
            )
            self.weights = FullyConnectedNet([8, 16, self.product.weight_numel], torch.relu)

        def forward(self, x: Tensor, directions: Tensor, lengths: Tensor) -> Tensor:
            harmonics = o3.spherical_harmonics(self.around, directions, normalize=True)
            return self.product(x, harmonics, self.weights(lengths))

    return Built(Convolution(), (torch.randn(6, 10), torch.randn(6, 3), torch.randn(6, 8)))


# Differential equations, spikes, state spaces


def _odeint(method: str, adjoint: bool) -> Callable[[], Built]:
    def build() -> Built:
        import torchdiffeq

        class Slope(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))

            def forward(self, t: Tensor, y: Tensor) -> Any:
                return self.net(y)

        solve = torchdiffeq.odeint_adjoint if adjoint else torchdiffeq.odeint
        times = torch.linspace(0, 1, 5)

        def run(slope: Any, y: Tensor) -> Any:
            return solve(slope, y, times, method=method)

        return Built(Wrapped(Slope(), run), (torch.randn(3, 4),))

    return build


BUILDERS |= {
    "torchdiffeq/rk4": _odeint("rk4", adjoint=False),
    "torchdiffeq/dopri5": _odeint("dopri5", adjoint=False),
    "torchdiffeq/rk4 adjoint": _odeint("rk4", adjoint=True),
}


@case("torchcde/cdeint")
def _cde() -> Built:
    import torchcde

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(6, 18)

        def forward(self, t: Tensor, z: Tensor) -> Tensor:
            values: Tensor = self.net(z).tanh().view(*z.shape[:-1], 6, 3)
            return values

    def run(field: Any, coefficients: Tensor) -> Any:
        path = torchcde.LinearInterpolation(coefficients)
        start = torch.zeros(2, 6)
        return torchcde.cdeint(path, field, start, path.interval, adjoint=False, method="rk4",
                               options={"step_size": 1.0})  # fmt: skip

    return Built(Wrapped(Field(), run), (torch.randn(2, 5, 3),))


def _spikes(**settings: Any) -> Callable[[], Built]:
    def build() -> Built:
        import snntorch

        class Spiking(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)
                self.first = snntorch.Leaky(beta=0.9, **settings)
                self.second = snntorch.Synaptic(alpha=0.8, beta=0.9)

            def forward(self, x: Tensor) -> Tensor:
                one, (current, two) = self.first.init_leaky(), self.second.init_synaptic()
                voltages = []
                for _ in range(4):
                    spikes, one = self.first(self.a(x), one)
                    _, current, two = self.second(self.b(spikes), current, two)
                    voltages.append(two)
                return torch.stack(voltages)

        return Built(Spiking(), (torch.rand(3, 8),))

    return build


BUILDERS |= {
    "snntorch/Leaky": _spikes(),
    "snntorch/Leaky with a learned decay": _spikes(learn_beta=True, learn_threshold=True),
}


@case("mambapy/Mamba")
def _mamba() -> Built:
    from mambapy.mamba import Mamba, MambaConfig

    return Built(Mamba(MambaConfig(d_model=16, n_layers=2, d_state=4)), (torch.randn(2, 16, 16),))


@case("xlstm/mLSTM blocks")
def _xlstm() -> Built:
    import xlstm

    layer = xlstm.mLSTMBlockConfig(
        mlstm=xlstm.mLSTMLayerConfig(conv1d_kernel_size=4, qkv_proj_blocksize=4, num_heads=2)
    )
    config = xlstm.xLSTMBlockStackConfig(
        mlstm_block=layer, context_length=16, num_blocks=2, embedding_dim=32
    )
    return Built(xlstm.xLSTMBlockStack(config), (torch.randn(2, 16, 32),))


@case("xlstm/sLSTM blocks")
def _slstm() -> Built:
    import xlstm

    slstm = xlstm.sLSTMLayerConfig(backend="vanilla", num_heads=2, conv1d_kernel_size=4)
    config = xlstm.xLSTMBlockStackConfig(
        slstm_block=xlstm.sLSTMBlockConfig(slstm=slstm), context_length=8, num_blocks=2,
        embedding_dim=32, slstm_at="all",
    )  # fmt: skip
    return Built(xlstm.xLSTMBlockStack(config), (torch.randn(2, 8, 32),))
