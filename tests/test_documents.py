"""README and docs are true: their Python and their commands run, their schema holds, their links
lead somewhere."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner

import rockplan
from rockplan import read_plans
from rockplan.cli.main import app
from rockplan.store.plan_file import dump_plans, parse_plans
from tests.processes import LEAVE, torchrun

ROOT = Path(__file__).parent.parent


DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.md"))


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


QUICKLY = "from tests.planning import plan_quickly\n\nplan_quickly()\n"


def blocks(path: Path, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


def examples(kind: str) -> list[tuple[str, str]]:
    return [
        (f"{path.name}-{i}", block)
        for path in DOCUMENTS
        for i, block in enumerate(blocks(path, kind))
    ]


def named(kind: str) -> dict[str, Any]:
    found = examples(kind)
    return {"argvalues": found, "ids": [name for name, _ in found]}


@pytest.mark.parametrize(("name", "code"), **named("python"))
def test_example_runs(name: str, code: str, tmp_path: Path) -> None:
    if "torchrun" in code:
        script = tmp_path / "train.py"
        script.write_text(QUICKLY + code + LEAVE)
        torchrun(script, tmp_path)
        return
    exec(compile(code, name, "exec"), {"__name__": name})


def test_the_mechanisms_print_what_the_model_shows(capsys: pytest.CaptureFixture[str]) -> None:
    """Every example of the page on one graph, one after the other; the diagram of the pipeline is
    one of them."""
    model = ROOT / "docs" / "model.md"
    pairs = re.findall(
        r"^```python model\n(.*?)^```\n\n```text\n(.*?)^```",
        model.read_text(),
        re.DOTALL | re.MULTILINE,
    )
    assert [code for code, _ in pairs] == blocks(model, "python model")
    names: dict[str, Any] = {}
    for code, shown in pairs:
        exec(compile(code, "model.md", "exec"), names)
        printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
        assert printed == shown.splitlines(), code


NET = """
import torch
import rockplan
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
layers = [[nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)] for _ in range(3)]
model = nn.Sequential(*[module for layer in layers for module in layer])
x = torch.randn(64, 16)
loader = DataLoader(TensorDataset(x, torch.randn(64, 16)), batch_size=64)
before = [p.clone() for p in model.parameters()]

def loss(net, batch):
    return nn.functional.mse_loss(net(batch[0]), batch[1])

def check(net):
    assert net.plan.overhead > 0
    assert not any(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
"""

TRAINED = """
for batch in loader:
    loss(model, batch).backward()
    optimizer.step()
check(model)
"""

LIGHTNING = """
class Regression(Module):
    def training_step(self, batch, number):
        return loss(self.net, batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

trainer = lightning.Trainer(
    max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)
module = Regression(model, x)
trainer.fit(module, loader)
check(module.net)
"""

TRAINER = """
import transformers

config = transformers.GPT2Config(
    n_layer=1, n_embd=16, n_head=2, vocab_size=64, n_positions=48, bos_token_id=0, eos_token_id=0,
)
model = transformers.AutoModelForCausalLM.from_config(config)
before = [p.clone() for p in model.parameters()]
ids = torch.randint(0, 64, (8, 48))
dataset = [{"input_ids": row, "labels": row} for row in ids]
arguments = transformers.TrainingArguments(
    output_dir="out", use_cpu=True, report_to=[], disable_tqdm=True, num_train_epochs=1
)
"""

ACCELERATE = """
import accelerate

accelerator = accelerate.Accelerator(cpu=True)
optimizer = torch.optim.AdamW(model.parameters())
"""

LORA = """
import peft
"""

PLANNED_TRAINER = """
trainer.train()
assert len(model.plans) == 1 and model.plan.overhead > 0
"""

TRL = """
import functools

import datasets
import tokenizers
import transformers
import trl

trl.SFTConfig = functools.partial(trl.SFTConfig, use_cpu=True, bf16=False, report_to=[])
words = tokenizers.models.WordLevel({str(i): i for i in range(64)}, unk_token="3")
tokens = transformers.PreTrainedTokenizerFast(
    tokenizer_object=tokenizers.Tokenizer(words), pad_token="0", bos_token="1", eos_token="2"
)
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=88, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4,
)
model = transformers.AutoModelForCausalLM.from_config(config)
ids = torch.randint(4, 64, (8, 48))
dataset = datasets.Dataset.from_dict({"input_ids": ids.tolist()})
before = [p.clone() for p in model.parameters()]
"""

TRL_TRAINED = """
trainer.train()
assert decoder is model and model.model.plan.overhead > 0
assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
"""

AROUND = {
    "loop": (NET, TRAINED),
    "trainer": (NET + TRAINER, f"{PLANNED_TRAINER}\ncheck(model)\n"),
    "lora": (NET + TRAINER + LORA, PLANNED_TRAINER),
    "trl": (NET + TRL, TRL_TRAINED),
    "lightning": (f"import pytorch_lightning as lightning\n{NET}", LIGHTNING),
    "accelerate": (NET + ACCELERATE, TRAINED),
}
"""What stands before and after the lines that are shown to people who have a script already."""


@pytest.mark.parametrize("kind", AROUND)
def test_lines_for_a_training_script(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, which has imported the libraries: that takes longest."""
    ((_, lines),) = examples(f"python {kind}")
    before, after = AROUND[kind]
    lines = lines.replace('"auto"', '"60%"')  # which leaves something to compute again
    script = tmp_path / "train.py"
    script.write_text(f"{before}\n{lines}\n{after}")
    if kind == "trl":
        import trl

        monkeypatch.setattr(trl, "SFTConfig", trl.SFTConfig)  # which a script replaces
    runpy.run_path(str(script))


@pytest.mark.parametrize(("name", "session"), **named("console"))
def test_commands_run(name: str, session: str) -> None:
    """Every `$ rockplan ...` of a session works, and prints lines that begin as those shown, up to
    figures, which differ by machine."""
    steps = re.split(r"^\$ rockplan ", session, flags=re.MULTILINE)[1:]
    assert steps
    for step in steps:
        command, _, shown = step.partition("\n")
        words = shlex.split(command)
        if words[0] == "solve":  # no stage of the search is left out on a busy machine
            words += ["--time-limit", "600"]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        assert beginnings(shown) - {"..."} <= beginnings(result.stdout), command


def beginnings(text: str) -> set[str]:
    """First words of lines, without their figures."""
    words = (line.split()[0] for line in text.splitlines() if line.strip())
    return {re.sub(r"\d+(\.\d+)?", "0", word) for word in words}


PLAN = ROOT / "docs" / "plan.md"
SAVE = ["-b", "50%", "--save", "plan.json"]


def test_the_schema_describes_the_example_and_real_plans() -> None:
    (schema,) = map(json.loads, blocks(PLAN, "json schema"))
    (example,) = blocks(PLAN, "json example")
    check = jsonschema.Draft202012Validator(schema)
    check.check_schema(schema)
    check.validate(json.loads(example))
    assert len(parse_plans(example)) == 1
    assert CliRunner().invoke(app, ["solve", "rockplan.examples:mlp", *SAVE]).exit_code == 0
    text = dump_plans(read_plans("plan.json"))
    check.validate(json.loads(text))
    for wrong in ('"time_ns":-1', '"time_ns":1.5', '"time_ns":"1"', '"time":1'):
        with pytest.raises(jsonschema.ValidationError):
            check.validate(json.loads(re.sub(r'"time_ns":\d+', wrong, text, count=1)))


def headings(path: Path) -> set[str]:
    """What `#...` may name in a document: its headings in small letters, with dashes for spaces."""
    prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", prose, re.MULTILINE):
        plain = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        assert plain not in found, f"{path.name} has two headings {heading!r}"
        found.add(plain)
    return found


def links(path: Path) -> list[str]:
    """Targets of links and pictures that lie in the repository."""
    prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    targets = re.findall(r"\]\(([^)\s]+)\)", prose)
    return [t for t in targets if not re.match(r"[a-z]+:", t)]


def test_links_lead_somewhere() -> None:
    for path in (*DOCUMENTS, *RESULTS):
        for target in links(path):
            name, _, heading = target.partition("#")
            file = (path.parent / name).resolve() if name else path
            assert file.is_relative_to(ROOT.resolve()) and file.is_file(), (path, target)
            assert not heading or heading in headings(file), (path, target)


def test_every_error_has_a_row() -> None:
    text = (ROOT / "docs" / "errors.md").read_text()
    kinds = (getattr(rockplan, name) for name in rockplan.__all__)
    errors = {k.__name__ for k in kinds if isinstance(k, type) and issubclass(k, Exception)}
    assert {name for name in errors if f"| `{name}`" not in text} <= {"RockplanError"}


def test_readme_is_one_page() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_readme_lists_every_document() -> None:
    listed = {ROOT / target.partition("#")[0] for target in links(ROOT / "README.md")}
    assert set(DOCUMENTS[1:]) <= listed
