"""Small models of transformers, and trainers of them: transformers' own, and those of TRL. Nothing
is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import peft
import torch
import transformers
import trl
from tokenizers import Tokenizer, models, pre_tokenizers

transformers.logging.set_verbosity_error()
datasets.disable_progress_bars()

LENGTH = 24
ROWS = 4
WORDS = ("<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(124)))
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def make_llama(layers: int = 2) -> Any:
    """As `from_config` and `from_pretrained` give it."""
    torch.manual_seed(0)
    sizes = {**SIZES, "intermediate_size": 88, "num_key_value_heads": 2}
    sizes["num_hidden_layers"] = layers
    config = transformers.LlamaConfig(vocab_size=len(WORDS), pad_token_id=0, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config).train()


def make_gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=4, vocab_size=len(WORDS), n_positions=32
    )
    return transformers.AutoModelForCausalLM.from_config(config).train()


def make_mixtral() -> Any:
    """With a loss of its routers beside the whole loss."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=len(WORDS), intermediate_size=64, num_key_value_heads=2, num_local_experts=4,
        output_router_logits=True, **SIZES,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).train()


def tokens(rows: int = ROWS, seed: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, len(WORDS), (rows, LENGTH), generator=generator)


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences that are their own targets."""

    def __len__(self) -> int:
        return 3 * ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = tokens(3 * ROWS)[index]
        return {"input_ids": ids, "labels": ids}


def settings(folder: Path) -> dict[str, Any]:
    """Three steps, every one logged."""
    return {
        "output_dir": str(folder), "use_cpu": True, "report_to": [], "disable_tqdm": True,
        "max_steps": 3, "per_device_train_batch_size": ROWS, "logging_steps": 1, "seed": 3,
        "save_strategy": "no", "bf16": False, "learning_rate": 1e-2,
    }  # fmt: skip


def history(trainer: transformers.Trainer) -> list[tuple[float, float]]:
    """Losses and norms of gradients, from a seed."""
    torch.manual_seed(7)
    trainer.train()
    rows = trainer.state.log_history
    found = [(row["loss"], row["grad_norm"]) for row in rows if "grad_norm" in row]
    assert len(found) == 3
    return found


def lora(layers: list[int] | None = None) -> peft.LoraConfig:
    return peft.LoraConfig(
        r=4, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], lora_dropout=0.1,
        layers_to_transform=layers,
    )  # fmt: skip


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    numbers = {word: i for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )


def texts(seed: int, length: int) -> list[str]:
    return [" ".join(WORDS[i] for i in row[:length]) for row in tokens(3 * ROWS, seed)]


def supervised(model: Any, folder: Path, config: peft.LoraConfig | None = None) -> Any:
    data = datasets.Dataset.from_dict({"text": texts(4, LENGTH - 1)})
    arguments = trl.SFTConfig(**settings(folder), max_length=LENGTH, gradient_checkpointing=False)
    return trl.SFTTrainer(
        model=model, args=arguments, train_dataset=data, processing_class=make_tokenizer(),
        peft_config=config,
    )  # fmt: skip


def preferred(
    model: Any,
    folder: Path,
    config: peft.LoraConfig | None = None,
    kind: Any = trl.DPOTrainer,
) -> Any:
    """Rows of chosen and rejected answers, of LENGTH tokens each."""
    chosen, rejected = texts(5, LENGTH - 9), texts(6, LENGTH - 9)
    data = datasets.Dataset.from_dict(
        {
            "prompt": texts(4, 8),
            "chosen": [f" {t}" for t in chosen],
            "rejected": [f" {t}" for t in rejected],
        }
    )
    arguments = trl.DPOConfig(**settings(folder), max_length=LENGTH, gradient_checkpointing=False)
    return kind(
        model=model, args=arguments, train_dataset=data, processing_class=make_tokenizer(),
        peft_config=config, ref_model=None if config else make_llama(),
    )  # fmt: skip


def unpaired(
    model: Any,
    folder: Path,
    config: peft.LoraConfig | None = None,
    kind: Any = trl.KTOTrainer,
) -> Any:
    """Rows of answers that are wanted or not, of LENGTH tokens each."""
    rows = {"prompt": texts(4, 8), "completion": [f" {t}" for t in texts(5, LENGTH - 9)]}
    wanted = [number % 3 > 0 for number in range(3 * ROWS)]
    arguments = trl.KTOConfig(**settings(folder), max_length=LENGTH, gradient_checkpointing=False)
    return kind(
        model=model, args=arguments, processing_class=make_tokenizer(), peft_config=config,
        train_dataset=datasets.Dataset.from_dict({**rows, "label": wanted}),
        ref_model=None if config else make_llama(),
    )  # fmt: skip
