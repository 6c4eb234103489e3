"""What fits of a Llama of 8B parameters, on the meta device: README's table, and what it costs.

    OMP_NUM_THREADS=1 python -m benchmarks.fit_8b

32 layers of width 4096, vocabulary 128256, bfloat16, 512 tokens, batches up to 64 on an H200 with
AdamW, for steps that use the loss alone. Writes benchmarks/results/fit_8b.md.
"""

from __future__ import annotations

import resource
import time
from pathlib import Path

import torch
import transformers

import rockplan
from benchmarks.timing import where

RESULT = Path(__file__).parent / "results" / "fit_8b.md"


def main() -> None:
    config = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()
        ids = torch.zeros(1, 512, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    options = rockplan.Options(only_loss=True, time_limit_s=20)
    begin = time.process_time()
    found = rockplan.fit(model, batch, "h200", sizes={0: (1, 64)}, options=options)
    seconds = time.process_time() - begin
    most_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    cost = f"{seconds:.0f} s of CPU time, {most_gib:.1f} GiB of memory at most"
    text = f"`python -m benchmarks.fit_8b`, {where()}: {cost}.\n\n```text\n{found}\n```\n"
    print(text)
    RESULT.write_text(text)


if __name__ == "__main__":
    main()
