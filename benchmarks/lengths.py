"""Training on batches of ever new sizes: seconds of all steps, planned and eager, side by side.

    python -m benchmarks.lengths [--steps 100] [MODEL ...]

Each row is a process of its own, in which a module that is planned for its first batch and the
eager one take turns at the same steps with AdamW; each batch has a size drawn at random. Losses are
compared bit by bit at each step, parameters at the end, and at five sizes the measured peak with
the plan's. CPU seconds on one thread, since machines are shared: planning in training is among
them.
Writes benchmarks/results/lengths.jsonl and lengths.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import rockplan
from benchmarks.timing import where
from rockplan.values import progress
from testing import models

RESULTS = Path(__file__).parent / "results"
STEPS, LENGTHS = 30, 20


def lengths_of(longest: int) -> list[int]:
    """Of each step: the first 20 all differ."""
    drawn = random.Random(0)
    known = drawn.sample(range(2 * longest // 3, longest), LENGTHS)
    return known + drawn.choices(known, k=STEPS - LENGTHS)


@dataclass(frozen=True, slots=True)
class Varied:
    """A model, how a call of some sizes looks, and how sizes are drawn."""

    model: nn.Module
    call: Callable[..., dict[str, Tensor]]
    sizes: Callable[[random.Random], tuple[int, ...]]
    budget: str = "70%"


def padded(rng: random.Random, batch: int = 4, longest: int = 384) -> int:
    """The longest of a batch of log-normal lengths, as a collator pads it."""
    return max(min(longest, max(8, int(rng.lognormvariate(4.5, 0.6)))) for _ in range(batch))


def with_mask(case: models.Case) -> Callable[..., dict[str, Tensor]]:
    ids = case.kwargs["input_ids"]

    def call(n: int) -> dict[str, Tensor]:
        mask = torch.ones(ids.shape[0], n, dtype=torch.long)
        mask[0, n // 2 :] = 0
        own = ids[:, :n].contiguous()
        labels = own.masked_fill(mask == 0, -100)
        return {"input_ids": own, "attention_mask": mask, "labels": labels}

    return call


def decoder(budget: str) -> Varied:
    case = models.llama(layers=4, width=64, vocabulary=256, batch=4, length=384)
    return Varied(case.model, with_mask(case), lambda rng: (padded(rng),), budget)


def gpt2() -> Varied:
    case = models.gpt2(layers=4, width=64, batch=4, length=384)
    cut: Any = lambda n: {k: t[:, :n].contiguous() for k, t in case.kwargs.items()}  # noqa: E731
    return Varied(case.model, cut, lambda rng: (padded(rng),))


def bert() -> Varied:
    case = models.bert(layers=4, width=64, batch=4, length=384)
    return Varied(case.model, with_mask(case), lambda rng: (padded(rng),))


def t5() -> Varied:
    case = models.t5(layers=2, width=64, batch=4, length=384)

    def call(n: int, m: int) -> dict[str, Tensor]:
        ids = case.kwargs["input_ids"]
        return {"input_ids": ids[:, :n].contiguous(), "labels": ids[:, :m].contiguous()}

    return Varied(case.model, call, lambda rng: (padded(rng), padded(rng, longest=128)))


class Messages(nn.Module):
    """GraphSAGE: the mean of what comes along the edges, four times."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.own = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.sent = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        one = torch.ones(edges.shape[1], 1)
        count = x.new_zeros(x.shape[0], 1).index_add(0, edges[1], one).clamp(min=1)
        for own, sent in zip(self.own, self.sent, strict=True):
            arrived = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]]) / count
            x = (own(x) + sent(arrived)).relu()
        return x.square().mean()


def graphs(nodes: int) -> Varied:
    def call(n: int, m: int) -> dict[str, Tensor]:
        return {"x": torch.randn(n, 64), "edges": torch.randint(0, n, (2, m))}

    def sizes(rng: random.Random) -> tuple[int, int]:
        n = rng.randint(nodes // 2, nodes)
        return n, int(n * rng.uniform(3, 6))

    return Varied(Messages(), call, sizes, "90%")


def images() -> Varied:
    case = models.unet(levels=3, width=8, batch=2, size=64)

    def call(height: int, width: int) -> dict[str, Tensor]:
        return {"x": torch.randn(2, 3, height, width)}

    even: Any = lambda rng: (8 * rng.randint(4, 16), 8 * rng.randint(4, 16))  # noqa: E731
    return Varied(case.model, call, even, "90%")


def mixture() -> Varied:
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        use_cache=False,
    )
    model = transformers.MixtralForCausalLM(config).train()

    def call(n: int) -> dict[str, Tensor]:
        ids = torch.randint(3, 256, (4, n))
        return {"input_ids": ids, "labels": ids}

    return Varied(model, call, lambda rng: (padded(rng),), "80%")


class Towers(nn.Module):
    """One BERT on two texts, the loss of pairs among all of the batch."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, one: dict[str, Tensor], other: dict[str, Tensor]) -> Tensor:
        pair = []
        for text in (one, other):
            mask = text["attention_mask"][..., None]
            states = self.encoder(**text).last_hidden_state * mask
            pair.append(nn.functional.normalize(states.sum(1) / mask.sum(1)))
        return nn.functional.cross_entropy(pair[0] @ pair[1].T * 20, torch.arange(len(mask)))


def towers() -> Varied:
    import transformers

    config = transformers.BertConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
    )

    def text(n: int) -> dict[str, Tensor]:
        mask = torch.ones(8, n, dtype=torch.long)
        mask[0, n // 2 :] = 0
        return {"input_ids": torch.randint(3, 256, (8, n)), "attention_mask": mask}

    model = Towers(transformers.BertModel(config, add_pooling_layer=False)).train()
    drawn: Any = lambda rng: (padded(rng), padded(rng))  # noqa: E731
    return Varied(model, lambda n, m: {"one": text(n), "other": text(m)}, drawn, "100%")


def vision() -> Varied:
    case = models.vit(layers=4, width=96, batch=4, size=64, patch=8)

    def call(height: int, width: int) -> dict[str, Any]:
        images = torch.randn(4, 3, height, width)
        labels = torch.randint(0, 10, (4,))
        return {"pixel_values": images, "labels": labels, "interpolate_pos_encoding": True}

    even: Any = lambda rng: (8 * rng.randint(6, 20), 8 * rng.randint(6, 20))  # noqa: E731
    return Varied(case.model, call, even, "100%")


def whisper() -> Varied:
    """Sound of one length, as Whisper pads it, and texts of many."""
    import transformers

    config = transformers.WhisperConfig(
        vocab_size=256,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_source_positions=200,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    model = transformers.WhisperForConditionalGeneration(config).train()

    def call(n: int) -> dict[str, Tensor]:
        return {
            "input_features": torch.randn(4, 80, 400),
            "labels": torch.randint(3, 256, (4, n)),
        }

    return Varied(model, call, lambda rng: (padded(rng),), "100%")


def experts() -> Varied:
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        use_cache=False,
        experts_implementation="grouped_mm",
    )
    model = transformers.Qwen3MoeForCausalLM(config).train()

    def call(n: int) -> dict[str, Tensor]:
        ids = torch.randint(3, 256, (4, n))
        return {"input_ids": ids, "labels": ids}

    return Varied(model, call, lambda rng: (padded(rng),), "100%")


def pictures_and_text() -> Varied:
    """Llava: a picture of one size in each of two texts."""
    import transformers

    seen = transformers.CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=64,
        patch_size=8,
    )
    read = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
    )
    config = transformers.LlavaConfig(vision_config=seen, text_config=read, image_token_index=255)
    model = transformers.LlavaForConditionalGeneration(config).train()

    def call(n: int) -> dict[str, Any]:
        ids = torch.randint(3, 255, (2, 64 + n))
        ids[:, 2:66] = 255
        labels = ids.masked_fill(ids == 255, -100)
        images = torch.randn(2, 3, 64, 64)
        return {"input_ids": ids, "pixel_values": images, "labels": labels, "use_cache": False}

    return Varied(model, call, lambda rng: (padded(rng),), "100%")


class Clicks(nn.Module):
    """DLRM: bags of ids of many lengths, products of pairs."""

    def __init__(self, tables: int = 8, width: int = 32) -> None:
        super().__init__()
        bags = (nn.EmbeddingBag(1000, width, mode="sum") for _ in range(tables))
        self.bags = nn.ModuleList(bags)
        self.below = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.above = nn.Sequential(nn.Linear(width + pairs, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x: Tensor, ids: list[Tensor], offsets: list[Tensor], y: Tensor) -> Tensor:
        x = self.below(x)
        bags = [bag(i, o) for bag, i, o in zip(self.bags, ids, offsets, strict=True)]
        features = torch.stack([x, *bags], 1)
        products = features @ features.transpose(1, 2)
        one, other = torch.tril_indices(products.shape[1], products.shape[1], -1)
        joined = torch.cat([x, products[:, one, other]], 1)
        return nn.functional.binary_cross_entropy_with_logits(self.above(joined)[:, 0], y)


def clicks(rows: int = 512) -> Varied:
    def call(*lengths: int) -> dict[str, Any]:
        return {
            "x": torch.randn(rows, 13),
            "ids": [torch.randint(0, 1000, (n,)) for n in lengths],
            "offsets": [torch.arange(rows) * n // rows for n in lengths],
            "y": torch.rand(rows).round(),
        }

    drawn: Any = lambda rng: tuple(rows * 3 + rng.randint(0, rows) for _ in range(8))  # noqa: E731
    return Varied(Clicks(), call, drawn, "100%")


class Isomorphism(nn.Module):
    """GIN over a batch of graphs, each summed up."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Linear(16, width)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, width),
                nn.BatchNorm1d(width),
                nn.ReLU(),
                nn.Linear(width, width),
                nn.ReLU(),
            )
            for _ in range(5)
        )
        self.last = nn.Linear(width, 2)

    def forward(self, x: Tensor, edges: Tensor, batch: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            sent = x.index_select(0, edges[0])
            to = edges[1].view(-1, 1).expand_as(sent)
            x = layer(x + x.new_zeros(x.shape).scatter_add_(0, to, sent))
        whole = x.new_zeros(int(batch.max()) + 1, x.shape[1]).index_add_(0, batch, x)
        return nn.functional.cross_entropy(self.last(whole), y)


def many_graphs(count: int = 8) -> Varied:
    def call(edges: int, *nodes: int) -> dict[str, Tensor]:
        return {
            "x": torch.randn(sum(nodes), 16),
            "edges": torch.randint(0, sum(nodes), (2, edges)),
            "batch": torch.repeat_interleave(torch.arange(count), torch.tensor(nodes)),
            "y": torch.randint(0, 2, (count,)),
        }

    def sizes(rng: random.Random) -> tuple[int, ...]:
        nodes = [rng.randint(8, 30) for _ in range(count)]
        return int(sum(nodes) * rng.uniform(2, 4)), *nodes

    return Varied(Isomorphism(), call, sizes, "100%")


CASES: dict[str, Callable[[], Varied]] = {
    "Llama, masks, everything kept": lambda: decoder("100%"),
    "Llama, masks, 60 %": lambda: decoder("60%"),
    "GPT-2, dropout": gpt2,
    "BERT, masks": bert,
    "T5, two lengths": t5,
    "Mixtral": mixture,
    "U-net, images of many sizes": images,
    "GraphSAGE, 1500 to 3000 nodes": lambda: graphs(3000),
    "GraphSAGE, 150 to 300 nodes": lambda: graphs(300),
    "GIN, 8 graphs of 8 to 30 nodes": many_graphs,
    "two towers of BERT": towers,
    "ViT, images of many sizes": vision,
    "Whisper": whisper,
    "Qwen3 MoE, grouped_mm": experts,
    "Llava": pictures_and_text,
    "DLRM, bags of 8 tables": clicks,
}


def rows_of_tokens(count: int) -> Any:
    """Log-normal lengths."""
    import datasets

    rng = random.Random(0)
    lengths = [padded(rng, 1) for _ in range(count)]
    return datasets.Dataset.from_dict(
        {"input_ids": [[rng.randint(4, 127) for _ in range(n)] for n in lengths]}
    )


def with_lora(**settings: Any) -> Any:
    """transformers' Trainer, LoRA, batches padded to their longest."""
    import peft
    import transformers

    from testing import trainers

    collate = transformers.DataCollatorForLanguageModeling(trainers.make_tokenizer(), mlm=False)
    count = settings["max_steps"] * settings["per_device_train_batch_size"]
    return transformers.Trainer(
        peft.get_peft_model(trainers.make_llama(4), trainers.lora()).train(),
        transformers.TrainingArguments(**settings),
        train_dataset=rows_of_tokens(count),
        data_collator=collate,
    )


def packed(**settings: Any) -> Any:
    """TRL's trainer, packed rows in one sequence."""
    import trl

    from testing import trainers

    arguments = trl.SFTConfig(
        **settings, max_length=384, packing=True, gradient_checkpointing=False
    )
    count = 4 * settings["max_steps"] * settings["per_device_train_batch_size"]
    return trl.SFTTrainer(
        model=trainers.make_llama(4),
        args=arguments,
        train_dataset=rows_of_tokens(count),
        processing_class=trainers.make_tokenizer(),
    )


def pairs_of_sentences(**settings: Any) -> Any:
    """The trainer of sentence-transformers: one BERT on both texts of each pair, every batch padded
    to its longest, the loss of pairs among all of the batch."""
    import datasets
    import sentence_transformers as library
    import transformers
    from sentence_transformers.sentence_transformer import losses, modules

    from testing import trainers

    config = transformers.BertConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
    )
    folder = f"{settings['output_dir']}/model"
    transformers.BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    trainers.make_tokenizer().save_pretrained(folder)
    read = modules.Transformer(folder)
    model = library.SentenceTransformer(modules=[read, modules.Pooling(64)], device="cpu").train()
    rng = random.Random(0)
    count = settings["max_steps"] * settings["per_device_train_batch_size"]

    def texts() -> list[str]:
        return [" ".join(rng.choices(trainers.WORDS, k=padded(rng, 1))) for _ in range(count)]

    return library.SentenceTransformerTrainer(
        model=model,
        args=library.SentenceTransformerTrainingArguments(**settings),
        train_dataset=datasets.Dataset.from_dict({"anchor": texts(), "positive": texts()}),
        loss=losses.MultipleNegativesRankingLoss(model),
    )


TRAINERS: dict[str, Callable[..., Any]] = {
    "Trainer, LoRA, padded to the longest": with_lora,
    "TRL, packing": packed,
    "sentence-transformers, two towers": pairs_of_sentences,
}


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds of all steps, and ms of one in the median. second_s: of the slower of the first two
    steps, which records with symbols; after: all later ones, in times of eager; new_ms: of steps
    with a new size, from the second on;
    plans: schedules, one for the first batch among them; captures: of calls in training; gap: the
    most that a measured peak was below the predicted one, as a share; None where a trainer runs the
    steps, whose first one plans."""

    model: str
    where: str
    steps: int
    sizes: int
    eager_s: float
    planned_s: float
    second_s: float
    after: float
    eager_ms: float
    new_ms: float
    plans: int
    captures: int
    gap: float | None

    @property
    def ratio(self) -> float:
        return self.planned_s / self.eager_s


def measured(name: str, steps: int) -> Row:
    """Train both modules of a case in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng = random.Random(0)
    varied = CASES[name]()
    eager = copy.deepcopy(varied.model)
    options = rockplan.Options(cache=False)
    first = varied.call(*varied.sizes(rng))
    planned: Any = rockplan.solve(
        varied.model, (), varied.budget, sample_kwargs=first, options=options
    )
    modules = (eager, planned)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in modules]
    taken: tuple[list[float], list[float]] = ([], [])
    captured, met = 0, set()
    new: list[float] = []
    gap = 0.0
    for step in range(steps):
        sizes = varied.sizes(rng)
        call = varied.call(*sizes)
        losses = []
        stages: list[str] = []
        for module, optimizer, seconds in zip(modules, optimizers, taken, strict=True):
            torch.manual_seed(step)
            started = time.process_time()
            with progress.listening(lambda said, to=stages: to.append(said.stage)):
                optimizer.zero_grad()
                result = module(**call)
                loss = getattr(result, "loss", result)
                loss = loss if loss.dim() == 0 else loss.square().mean()
                loss.backward()
                optimizer.step()
            seconds.append(time.process_time() - started)
            losses.append(loss.detach())
        assert torch.equal(*losses), (name, step, sizes)
        captured += "capturing the model" in stages
        if step and sizes not in met:
            new.append(taken[1][-1])
        met.add(sizes)
        if step % max(steps // 5, 1) == 1:
            gap = max(gap, gap_of(planned, call))
    pairs = zip(eager.parameters(), planned.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs), name
    return Row(
        model=name,
        where=where(),
        steps=steps,
        sizes=len(met),
        eager_s=round(sum(taken[0]), 2),
        planned_s=round(sum(taken[1]), 2),
        second_s=round(max(taken[1][:2]), 2),
        after=round(sum(taken[1][2:]) / sum(taken[0][2:]), 3),
        eager_ms=round(1e3 * median(taken[0]), 1),
        new_ms=round(1e3 * median(new), 1),
        plans=len(planned.plans),
        captures=captured,
        gap=gap,
    )


class Collated:
    """A collator that notes the sizes of its batches."""

    def __init__(self, collate: Any, sizes: list[tuple[int, ...]]) -> None:
        self._collate, self._sizes = collate, sizes

    def __call__(self, rows: Any) -> Any:
        batch = self._collate(rows)
        ids = (t for name, t in batch.items() if name.endswith("input_ids"))
        self._sizes.append(tuple(n for t in ids for n in t.shape))
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._collate, name)


def trained(name: str, steps: int) -> Row:
    """Train twice from one seed in this process: as it is, and planned in place."""
    import transformers

    from rockplan.integrations.transformers import RockplanCallback
    from rockplan.runtime.planned_state import programs_of

    torch.set_num_threads(1)

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.sizes: list[tuple[int, ...]] = []
            self.stages: list[list[str]] = []
            self.plans = 0

        def on_step_begin(self, *_: Any, **more: Any) -> None:
            self.stages.append([])
            self.started = time.process_time()

        def on_step_end(self, *_: Any, model: Any = None, **more: Any) -> None:
            self.seconds.append(time.process_time() - self.started)
            programs = (p for m in model.modules() for p in programs_of(m))
            self.plans = len({id(program) for program in programs})

    runs = []
    for is_planned in (False, True):
        clock = Clock()
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            trainer = TRAINERS[name](
                output_dir=folder,
                use_cpu=True,
                report_to=[],
                disable_tqdm=True,
                max_steps=steps,
                per_device_train_batch_size=4,
                logging_steps=1,
                save_strategy="no",
                bf16=False,
            )
            trainer.data_collator = Collated(trainer.data_collator, clock.sizes)
            trainer.add_callback(clock)
            if is_planned:
                trainer.add_callback(RockplanCallback("100%", rockplan.Options(cache=False)))
            torch.manual_seed(1)
            with progress.listening(lambda said, to=clock: to.stages[-1].append(said.stage)):
                trainer.train()
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        runs.append((clock, losses, [p.detach() for p in trainer.model.parameters()]))
    (eager, *expected), (clock, *found) = runs
    assert expected[0] == found[0], name
    assert all(map(torch.equal, expected[1], found[1])), name
    sizes = clock.sizes[: len(clock.seconds)]
    new = [s for i, s in enumerate(clock.seconds) if i > 1 and sizes[i] not in sizes[:i]]
    return Row(
        model=name,
        where=where(),
        steps=steps,
        sizes=len({*sizes}),
        eager_s=round(sum(eager.seconds), 2),
        planned_s=round(sum(clock.seconds), 2),
        second_s=round(max(clock.seconds[:2]), 2),
        after=round(sum(clock.seconds[2:]) / sum(eager.seconds[2:]), 3),
        eager_ms=round(1e3 * median(eager.seconds), 1),
        new_ms=round(1e3 * median(new), 1),
        plans=clock.plans,
        captures=sum("capturing the model" in stages for stages in clock.stages),
        gap=None,
    )


def gap_of(planned: Any, call: dict[str, Tensor]) -> float:
    """By how much less than predicted a step needs, as a share of it; raises if it needs more."""
    buffers = copy.deepcopy(dict(planned.named_buffers()))

    def step() -> None:
        result = planned(**call)
        loss = getattr(result, "loss", result)
        (loss if loss.dim() == 0 else loss.square().mean()).backward()

    peak_bytes, _ = rockplan.peak_live_bytes(step, 1)
    plan = planned.plan
    assert peak_bytes <= plan.peak_bytes <= plan.budget_bytes
    planned.zero_grad()
    with torch.no_grad():
        for name, buffer in planned.named_buffers():
            buffer.copy_(buffers[name])
    return round(1 - peak_bytes / plan.peak_bytes, 4)


def report(rows: list[Row]) -> str:
    lines = [
        "# Lengths",
        "",
        "`python -m benchmarks.lengths`: training with AdamW on batches of sizes drawn at random, "
        "planned and eager in turns, CPU seconds on one thread, planning in training among them; "
        "planned for the first batch. Losses of each step and all "
        "parameters at the end equal eager's bit by bit; no measured peak was above the plan's, "
        "which was within its budget. Trainers run one after the other, the first step plans, and "
        "peaks are not measured.",
        "",
        "| model | steps | sizes | eager s | planned s | times eager | step that records s | all "
        "later steps, times eager | eager step ms | step with a new size ms | in steps of eager | "
        "captures | schedules | peak below the prediction by at most |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.model} | {r.steps} | {r.sizes} | {r.eager_s:.2f} | {r.planned_s:.2f} | "
        f"{r.ratio:.2f} | {r.second_s:.1f} | {r.after:.3f} | {r.eager_ms:.1f} | {r.new_ms:.1f} | "
        f"{r.new_ms / r.eager_ms:.2f} | {r.captures} | {r.plans} | "
        f"{'' if r.gap is None else format(r.gap, '.2%')} |"
        for r in rows
    ]
    lines += ["", "Where and when:", "", *dict.fromkeys(f"- {r.where}" for r in rows)]
    return "\n".join(lines) + "\n"


def in_own_process(name: str, steps: int) -> Row:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.lengths", "--here", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command += ["--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return Row(**json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=[*CASES, *TRAINERS], metavar="MODEL")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--here", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        run = trained if arguments.here in TRAINERS else measured
        print(json.dumps(asdict(run(arguments.here, arguments.steps))))
        return
    path = RESULTS / "lengths.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = {r.model: r for r in (Row(**json.loads(line)) for line in lines)}
    for name in arguments.models:
        row = in_own_process(name, arguments.steps)
        print(json.dumps(asdict(row), indent=1), flush=True)
        found[row.model] = row
        rows = [found[n] for n in (*CASES, *TRAINERS) if n in found]
        path.write_text("".join(json.dumps(asdict(r)) + "\n" for r in rows))
        (RESULTS / "lengths.md").write_text(report(rows))


if __name__ == "__main__":
    main()
