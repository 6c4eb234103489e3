"""The command line: what a user types, what comes back, and with which exit code."""

from __future__ import annotations

import base64
import json
import os
import pty
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import rockplan
from rockplan import examples
from rockplan.cli.ending import ExitCode
from rockplan.cli.main import app
from rockplan.store import documents
from testing.training import QUICK

MLP = "rockplan.examples:mlp"
TRANSFORMER = "rockplan.examples:transformer"


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words: str, code: int = 0) -> str:
    """stdout of `rockplan words...`, which must end with `code`."""
    result = CliRunner().invoke(app, words)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.stdout


def errors(*words: str, code: int) -> str:
    """What `rockplan words...` says on stderr when it ends with `code`."""
    result = CliRunner().invoke(app, words)
    assert result.exit_code == code, result.output
    return result.stderr


def as_json(*words: str, code: int = 0) -> Any:
    return json.loads(run(*words, "--json", code=code))


def process(*words: str, **settings: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "rockplan", *words]
    return subprocess.Popen(
        command,
        text=True,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parent.parent,
        **settings,
    )


# Blocks

STACK = "testing.blocks:factory"


def test_blocks_are_planned_for_each_budget() -> None:
    words = ("blocks", STACK, "layers.*", "-b", "60%", "-b", "2kB", "--time-limit", "1")
    found = as_json(*words, code=ExitCode.INFEASIBLE)
    assert found["model"] == STACK
    plan, least = found["plans"]
    assert plan["feasible"] and plan["peak_bytes"] <= plan["budget_bytes"]
    assert [block["path"] for block in plan["blocks"]] == [f"layers.{i}" for i in range(4)]
    assert 0 < plan["before_first_block_bytes"] <= plan["between_blocks_bytes"]
    assert not least["feasible"] and least["minimum_bytes"] > least["budget_bytes"] == 2000


def test_blocks_are_shown_by_kind() -> None:
    said = run("blocks", STACK, "-b", "min", "--time-limit", "1")
    for words in ("beside blocks", "layers.*  x4  kind 0"):
        assert words in said
    assert re.search(r"^    recomputes  .*gelu", said, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((STACK,), "blocks are planned for a --budget"),
        ((STACK, "layer.*", "-b", "min"), "names no module of this model; nearest: 'layers"),
    ],
)
def test_blocks_that_cannot_be_named(words: tuple[str, ...], expected: str) -> None:
    assert expected in errors("blocks", *words, code=ExitCode.USAGE)


# Stdout


def test_a_stdout_that_is_full_is_named() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "rockplan", "cache", "list"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=500)
    assert done.returncode == ExitCode.USAGE
    assert done.stderr.startswith("rockplan: stdout cannot be written: No space left")
    assert len(done.stderr.splitlines()) == 1


def test_a_reader_that_goes_away_is_no_error() -> None:
    gone, left = os.pipe()
    os.close(gone)
    command = [sys.executable, "-m", "rockplan", "solve", "--help"]
    with open(left, "w") as closed:
        done = subprocess.run(
            command, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=500
        )
    assert (done.returncode, done.stderr) == (0, "")


# Help


def commands(
    group: Any = None, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    group = group or typer.main.get_command(app)
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


COMMANDS = list(commands())


SPELLINGS = {
    "blocks": (
        "--autocast --best --budget --compile --host --host-path --json --link --near --no-cache"
        " --optimizer --size --time-limit -b"
    ),
    "compare": (
        "--autocast --best --budget --compile --compile-budget --json --near --no-cache"
        " --only-loss --rounds --tile --time-limit -b"
    ),
    "fit": (
        "--accumulate --autocast --average --batch --clip-norm --compile --device --gpu --gpus"
        " --grad-scaler --host --html --in-backward --inference --json --keep-gradients --length"
        " --link --near --only-loss --optimizer --remedies --shard --tile --time-limit"
    ),
    "plot": (
        "--autocast --budget --measure --no-cache --no-measure --output --picture"
        " --time-limit -b -o"
    ),
    "profile": ("--autocast --json --no-cache --top"),
    "show": (
        "--autocast --budget --code --compile --explain --json --kernels --near --no-cache"
        " --passes --tile -b"
    ),
    "solve": (
        "--accumulate --autocast --best --budget --check --compile --graph --host --host-path"
        " --json --link --near --no-cache --no-check --only-loss --optimizer --save --size"
        " --solver --tile --time-limit --trace --write-lp -b"
    ),
}


def test_options_of_commands_are_spelled_as_before() -> None:
    found = {
        path[0]: {one for p in command.params for one in (*p.opts, *p.secondary_opts)}
        for path, command in COMMANDS
        if len(path) == 1
    }
    spelled = {name: {o for o in words if o.startswith("-")} for name, words in found.items()}
    assert spelled == {name: set(words.split()) for name, words in SPELLINGS.items()}


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=[" ".join(p) for p, _ in COMMANDS])
def test_the_example_in_each_help_works(path: tuple[str, ...], command: Any) -> None:
    shown = " ".join(run(*path, "--help").split())
    assert command.epilog in shown
    program, *words = shlex.split(command.epilog.removeprefix("Example: "))
    assert program == "rockplan" and tuple(words[: len(path)]) == path
    assert run(*words).strip()


def test_help_and_the_cache_do_not_import_torch() -> None:
    program = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from rockplan.cli.main import app\n"
        "for words in (['--help'], ['solve', '--help'], ['cache', 'list']):\n"
        "    assert CliRunner().invoke(app, words).exit_code == 0\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=Path(__file__).parent.parent,
    )
    assert done.stdout == "False\n", done.stderr


def test_every_exit_code_is_documented() -> None:
    documented = " ".join(run("--help").split()).partition("Exit codes:")[2]
    for code in ExitCode:
        assert f" {code.value} " in documented


# Commands


def test_profile() -> None:
    found = as_json("profile", MLP)
    assert found["eager_peak_bytes"] > found["saved_bytes"] > 0
    for shares in (found["modules"], found["operators"]):
        assert sum(s["kept_bytes"] for s in shares) == found["saved_bytes"]
        assert sum(s["time_ns"] for s in shares) == found["eager_time_ns"]
        assert sum(s["operations"] for s in shares) == found["operations"]
    text = run("profile", MLP, "--top", "2")
    assert "addmm" in text and "(5 more)" in text and "*.*" in text


def test_profile_explains_the_model_as_it_runs_unplanned() -> None:
    """Not the plan for 100 %, which writes results where operands die, so needs less."""
    found = as_json("profile", MLP)
    explanation = found["explanation"]
    assert explanation["peak_bytes"] == found["eager_peak_bytes"]
    assert sum(t["size_bytes"] for t in explanation["tenants"]) == found["eager_peak_bytes"]
    model, args, _ = examples.mlp()
    plan = rockplan.plan(model, args, "100%", options=QUICK)
    assert explanation["peak_operation"] == rockplan.explain(plan, unplanned=True).peak_operation
    assert len(set(re.findall(r"\bpeak ([\d.]+ MiB)", run("profile", MLP)))) == 1


def test_solve_several_budgets() -> None:
    found = as_json("solve", MLP, "-b", "50%", "--budget", "1MiB", "-b", "min")["plans"]
    assert [row["budget"] for row in found] == ["50%", "1MiB", "min"]
    assert found[1]["budget_bytes"] == 2**20
    assert all(row["peak_bytes"] <= row["budget_bytes"] for row in found)
    assert found[2]["overhead"] > found[0]["overhead"] > found[1]["overhead"] >= 0
    assert all(0 <= row["certificate"]["gap"] < 1 for row in found)
    text = run("solve", MLP, "-b", "50%", "-b", "1MiB", "-b", "min").splitlines()
    assert [line.split()[0] for line in text] == ["asked", "50%", "1MiB", "min"]


def test_solve_one_budget_prints_the_plan() -> None:
    torch.manual_seed(0)
    text = run("solve", MLP, "-b", "50%")
    assert text.startswith("budget ") and "recomputes  " in text


SMALL = """
import torch
def make():
    layers = [torch.nn.Linear(8, 8) if i % 2 else torch.nn.Tanh() for i in range(7)]
    return torch.nn.Sequential(*layers), torch.randn(4, 8)
"""


def test_solve_without_a_budget_prints_the_curve(own_folder: Path) -> None:
    write(own_folder, "small.py", SMALL)
    points = as_json("solve", "small.py:make")["curve"]
    peaks = [p["peak_bytes"] for p in points]
    assert len(peaks) > 1 and peaks == sorted(peaks) and points[-1]["overhead"] == 0
    lines = run("solve", "small.py:make").splitlines()
    assert lines[0].split()[0] == "peak" and len(lines) == len(points) + 2


def test_compare() -> None:
    rows = as_json("compare", MLP, "-b", "50%", "--rounds", "1")["rows"]
    eager, planned = rows[0], rows[-1]
    assert eager["name"] == "eager" and "50%" in planned["name"]
    assert planned["peak_bytes"] <= planned["budget_bytes"] < eager["peak_bytes"]
    assert planned["gradients"] == "equal bit for bit"


def test_compare_where_no_budget_works() -> None:
    words = ("compare", MLP, "--rounds", "1", "-b", "1KB")
    assert "below the minimum" in run(*words, code=ExitCode.INFEASIBLE)
    assert "below the minimum" in run(*words, "-b", "50%")
    assert "does not parse" in errors(*words, "-b", "much", code=ExitCode.USAGE)


def test_saved_plans_are_shown_and_loaded(own_folder: Path) -> None:
    run("solve", MLP, "-b", "50%", "-b", "min", "--save", "{budget}.json", "--check")
    plans = {name: own_folder / f"{name}.json" for name in ("50pct", "min")}
    shown = as_json("show", "min.json")["plans"]
    assert [p["checked"] for p in shown] == ["equal to eager bit for bit on the sample"]
    assert run("show", "50pct.json") == f"{rockplan.read_plans(plans['50pct'])[0]}\n"
    model, args, _ = examples.mlp()
    loaded = rockplan.load(model, args, plans["min"])
    assert loaded.plan.peak_bytes == shown[0]["peak_bytes"]


def test_explain_a_plan(own_folder: Path) -> None:
    run("solve", MLP, "-b", "min", "--save", "plan.json")
    (found,) = as_json("show", "plan.json", "--explain")["plans"]
    tenants = found["explanation"]["tenants"]
    assert sum(t["size_bytes"] for t in tenants) == found["peak_bytes"]
    assert "who owns the peak" in run("show", "plan.json", "--explain")
    assert "who owns the peak" in run("profile", MLP)
    assert as_json("profile", MLP)["explanation"]["peak_bytes"] > found["peak_bytes"]


def test_show_the_code_of_a_model() -> None:
    found = as_json("show", MLP, "-b", "min", "--code")
    assert "def forward(" in found["code"] and len(found["plans"]) == 1
    assert "def forward(" in run("show", MLP, "-b", "min", "--code")


def test_autocast() -> None:
    plain = as_json("profile", MLP)
    reduced = as_json("profile", MLP, "--autocast", "bfloat16")
    assert reduced["saved_bytes"] < plain["saved_bytes"]


# Models


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)


MODEL = """
import torch
from {sibling} import WIDTH

class make:
    @staticmethod
    def small():
        return torch.nn.Linear(WIDTH, WIDTH), {{"input": torch.randn(4, WIDTH)}}
"""


def test_models_in_files_and_modules(own_folder: Path) -> None:
    (own_folder / "folder").mkdir()
    write(own_folder, "folder/sizes_of_file.py", "WIDTH = 8")
    write(own_folder, "folder/file_model.py", MODEL.format(sibling="sizes_of_file"))
    write(own_folder, "sizes_here.py", "WIDTH = 8")
    write(own_folder, "module_model.py", MODEL.format(sibling="sizes_here"))
    file = as_json("profile", "folder/file_model.py:make.small")
    module = as_json("profile", "module_model:make.small")
    assert file["graph_digest"] == module["graph_digest"]


FACTORIES = """
import torch
linear = torch.nn.Linear(4, 4)
number = 3
def nothing(): pass
def one(): return (linear,)
def four(): return linear, (), {}, 1
def no_args(): return linear, torch.randn(2, 4), {}
def no_model(): return 3, torch.randn(2, 4)
def no_sample(): return linear, 3
def takes(x): return linear, x
def fails(): raise KeyError("lost")
def says(): raise ValueError("A sentence.")
def exhausts(): raise MemoryError
def leaves(): raise SystemExit(3)
def wrong_shape(): return linear, torch.randn(2, 5)
class Branch(torch.nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x
def branch(): return Branch(), torch.randn(3, requires_grad=True)
"""


@pytest.mark.parametrize(
    ("name", "words", "code"),
    [
        ("transformer", "module:factory", ExitCode.USAGE),
        ("examples:", "module:factory", ExitCode.USAGE),
        ("no_such_module:make", "cannot be imported", ExitCode.USAGE),
        ("none.py:make", "no file none.py", ExitCode.USAGE),
        ("broken.py:make", "SyntaxError", ExitCode.USAGE),
        ("f.py:absent", "it has Branch, branch", ExitCode.USAGE),
        ("f.py:number", "is a int", ExitCode.USAGE),
        ("f.py:nothing", "returned a NoneType", ExitCode.USAGE),
        ("f.py:one", "returned 1 values", ExitCode.USAGE),
        ("f.py:four", "returned 4 values", ExitCode.USAGE),
        ("f.py:no_args", "args is a tuple", ExitCode.USAGE),
        ("f.py:no_model", "model is a int", ExitCode.USAGE),
        ("f.py:no_sample", "sample_input is a int", ExitCode.USAGE),
        ("f.py:takes", "takes no arguments", ExitCode.USAGE),
        ("f.py:fails", "KeyError: 'lost'", ExitCode.USAGE),
        ("f.py:says", "A sentence. A factory", ExitCode.USAGE),
        ("f.py:exhausts", "raised MemoryError. A factory", ExitCode.USAGE),
        ("f.py:leaves", "f.py:leaves called sys.exit(3)", ExitCode.USAGE),
        ("script.py:make", "script.py called sys.exit(0) while it was imported", ExitCode.USAGE),
        ("f.py:wrong_shape", "does not run", ExitCode.MODEL),
        ("f.py:branch", "torch.where", ExitCode.MODEL),
    ],
)
def test_what_cannot_be_planned_is_said(
    own_folder: Path, name: str, words: str, code: ExitCode
) -> None:
    write(own_folder, "f.py", FACTORIES)
    write(own_folder, "broken.py", "def make(:")
    write(own_folder, "script.py", "import sys\ndef make(): pass\nsys.exit(0)")
    assert words in errors("profile", name, code=code)
    error = as_json("solve", name, "-b", "min", code=code)["error"]
    assert words in error["message"] and error["type"]


PRINTING = """
import torch
print("of the file")
class Printing(torch.nn.Linear):
    def forward(self, x):
        print("of the model")
        return super().forward(x)
def make():
    print("of the factory")
    return Printing(4, 4), torch.randn(2, 4)
"""


def test_what_the_users_code_prints_is_no_result(own_folder: Path) -> None:
    write(own_folder, "printing.py", PRINTING)
    for words in (["solve", "printing.py:make", "-b", "min"], ["solve", "printing.py:make"]):
        result = CliRunner().invoke(app, [*words, "--json"])
        assert json.loads(result.stdout)["model"] == "printing.py:make"
        for place in ("file", "factory", "model"):
            assert f"of the {place}\n" in result.stderr


DEEP = """
import torch
from torch import nn

class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.stack = nn.ModuleList(
            nn.ModuleDict({"first_part_of_the_layer": nn.ModuleDict({
                "projection_of_the_hidden_states": nn.Linear(16, 16),
                "activation_of_the_hidden_states": nn.GELU()})}) for _ in range(3))

    def forward(self, x):
        for layer in self.stack:
            part = layer["first_part_of_the_layer"]
            x = part["activation_of_the_hidden_states"](part["projection_of_the_hidden_states"](x))
        return x.mean()

def make():
    return Deep(), torch.randn(32, 16)
"""


@pytest.mark.parametrize("model", ["deep.py:make", MLP])
def test_explanations_are_within_80_columns(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("deep.py").write_text(DEEP)
    profile, explained = run("profile", model), run("show", model, "-b", "80%", "--explain")
    for text in (profile, explained):
        assert "who owns the peak" in text
        assert not [line for line in text.splitlines() if len(line) > 80]
    # Nothing is left out for it.
    row = as_json("show", model, "-b", "80%", "--explain")["plans"][0]["explanation"]
    joined = "".join(explained.split())
    assert "".join(row["peak_operation"].split()) in joined
    assert "".join(row["shares"][0]["largest"].split()) in joined


# Errors and exit codes


def test_an_infeasible_budget_prints_the_minimum() -> None:
    found = as_json("solve", MLP, "-b", "1KB", "-b", "min", code=ExitCode.INFEASIBLE)["plans"]
    assert [row["feasible"] for row in found] == [False, True]
    minimum = found[0]["minimum_bytes"]
    assert found[1]["budget_bytes"] == minimum >= found[1]["peak_bytes"]
    assert str(minimum) in errors("solve", MLP, "-b", "1KB", code=ExitCode.INFEASIBLE)
    assert str(minimum) in run("solve", MLP, "-b", "1KB", code=ExitCode.INFEASIBLE)
    assert str(minimum) in errors("show", MLP, "-b", "1KB", code=ExitCode.INFEASIBLE)
    (share,) = re.findall(r"or '([\d.]+%)'", errors("solve", MLP, "-b", "1KB", code=3))
    (row, low) = as_json("solve", MLP, "-b", share, "-b", "0.1%")["plans"]
    assert row["budget_bytes"] >= minimum == low["budget_bytes"]
    assert "'50%'" in errors("solve", MLP, "-b", "50", code=ExitCode.USAGE)


@pytest.mark.parametrize(
    "words",
    [
        ["solve"],
        ["solve", MLP, "-b", "lots"],
        ["solve", MLP, "-b", "-3"],
        ["solve", MLP, "--save", "x.json"],
        ["solve", MLP, "-b", "1", "-b", "2", "--save", "x.json"],
        ["solve", MLP, "-b", "50%", "--save", "absent/x.json"],
        ["solve", MLP, "-b", "50%", "--save", ""],
        ["solve", MLP, "-b", "50%", "--save", "/"],
        ["solve", MLP, "-b", "50%", "--save", "."],
        ["solve", f"{'a' * 300}.py:make", "-b", "50%"],
        ["show", f"{'a' * 300}.json"],
        ["profile", MLP, "--top", "0"],
        ["profile", MLP, "--autocast", "float99"],
        ["show", MLP],
        ["show", "absent.json"],
        ["cache", "list", "sandwiches"],
        ["frobnicate"],
    ],
    ids=" ".join,
)
def test_wrong_usage(own_folder: Path, words: list[str]) -> None:
    assert errors(*words, code=ExitCode.USAGE).strip()
    assert list(own_folder.iterdir()) == []


def test_a_damaged_plan_file(own_folder: Path) -> None:
    write(own_folder, "plan.json", "{}")
    assert "plan.json" in errors("show", "plan.json", code=ExitCode.FILE)
    found = as_json("show", "plan.json", code=ExitCode.FILE)
    assert found["error"]["type"] == "PlanFormatError"


def test_names_in_files_do_not_command_the_terminal(own_folder: Path) -> None:
    run("solve", MLP, "-b", "min", "--save", "plan.json")
    document = json.loads(Path("plan.json").read_text())
    del document["digest"]
    (plan,) = document["plans"]
    plan["profile_source"] = "\x1b]0;owned\x07[bold]here"
    for block in plan["blocks"]:
        block[0] = "\x1b[2J"
    Path("plan.json").write_text(
        documents.canonical({**document, "digest": documents.digest(document)})
    )
    shown = run("show", "plan.json")
    assert "\x1b" not in shown and "\x07" not in shown and "[bold]here" in shown


# Interrupts and progress


def test_an_interrupt_leaves_nothing_half_written(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROCKPLAN_CACHE_DIR", str(own_folder / "cache"))
    write(own_folder, "plan.json", "as it was")

    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    words = ("solve", MLP, "-b", "50%", "--save", "plan.json")
    for place in ("search.stages.refined", "search.stages.exchanged", "store.plan_file.os.replace"):
        with monkeypatch.context() as patch:
            patch.setattr(f"rockplan.{place}", interrupt)
            assert "interrupted" in errors(*words, code=ExitCode.INTERRUPTED)
        assert Path("plan.json").read_text() == "as it was"
        assert not list(own_folder.rglob("*.part"))
        assert not any(entry["problem"] for entry in as_json("cache", "list")["entries"])
    run(*words)
    assert len(rockplan.read_plans("plan.json")) == 1


SIGNALLED = """
import os, signal, threading
from rockplan import examples
class Dropping:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000): pass
def drop():
    Dropping()
class Turning:
    def __set_name__(self, owner, name):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000): pass
def turn():
    try:
        type("Owner", (), {{"member": Turning()}})
    except BaseException as error:
        raise RuntimeError("as Python before 3.12 says of __set_name__") from error
def make():
    {how}
    return examples.transformer()
"""
LATER = "threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()"


@pytest.mark.parametrize(
    "how",
    [LATER, "drop()", "turn()"],
    ids=["once", "dropped by Python", "turned into another error"],
)
def test_a_signal_ends_with_its_exit_code(own_folder: Path, how: str) -> None:
    write(own_folder, "signalled.py", SIGNALLED.format(how=how))
    running = process(
        "solve", f"{own_folder}/signalled.py:make", "--no-cache", stderr=subprocess.PIPE
    )
    out, err = running.communicate(timeout=500)
    assert (running.returncode, out) == (ExitCode.INTERRUPTED, "")
    assert err.rstrip().endswith("interrupted; nothing was left half-written")


def test_progress_is_shown_on_a_terminal_only(own_folder: Path) -> None:
    """A process with stderr on a terminal, a call without; stdout is the same document."""
    write(own_folder, "model.py", MODEL.format(sibling="sizes"))
    write(own_folder, "sizes.py", "WIDTH = 4")
    words = ("profile", f"{own_folder}/model.py:make.small", "--no-cache", "--json")
    controller, terminal = pty.openpty()
    shown = process(*words, stderr=terminal, env={**os.environ, "TERM": "xterm"})
    os.close(terminal)
    seen = b""
    while True:
        try:
            seen += os.read(controller, 4096)
        except OSError:  # the other end is closed
            break
    quiet = CliRunner().invoke(app, words)
    documents = [json.loads(text) for text in (shown.communicate(timeout=500)[0], quiet.stdout)]
    assert b"capturing the model" in seen and b"measuring" in seen
    assert quiet.stderr == ""
    assert documents[0]["graph_digest"] == documents[1]["graph_digest"]


# The cache


def test_the_cache_is_listed_and_cleared(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = own_folder / "cache"
    monkeypatch.setenv("ROCKPLAN_CACHE_DIR", str(folder))
    assert as_json("cache", "list")["entries"] == []
    assert "0 entries" in run("cache", "list")
    run("solve", MLP, "-b", "50%")
    entries = as_json("cache", "list")["entries"]
    assert {e["kind"] for e in entries} == {"profile", "options", "plan"}
    (plan,) = (e for e in entries if e["kind"] == "plan")
    assert plan["key"]["budget"] == "0.5 of the unplanned peak"
    assert "predicted peak" in run("show", plan["path"])
    assert "budget 0.5 of the unplanned peak" in run("cache", "list", "plan")
    assert not any(entry["problem"] for entry in entries)
    Path(plan["path"]).write_text("{")
    (damaged,) = (e for e in as_json("cache", "list")["entries"] if e["problem"])
    assert damaged["path"] == plan["path"]
    assert "not a document of rockplan" in " ".join(run("cache", "list", "plan").split())
    assert "set aside" in CliRunner().invoke(app, ["solve", MLP, "-b", "50%"]).stderr
    assert as_json("cache", "clear", "options")["deleted"] == len(entries) - 2
    assert as_json("cache", "clear")["deleted"] == 3
    assert not [p for p in folder.rglob("*") if p.is_file()]


# Pictures


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    run("solve", MLP, "-b", "50%", "--save", str(path))
    return path


@pytest.mark.parametrize(
    ("output", "begins"), [("report.html", "<!doctype html>"), ("graph.dot", "digraph")]
)
def test_plot_a_plan_file(plan_file: Path, output: str, begins: str) -> None:
    assert run("plot", str(plan_file), "-o", output) == f"written: {output}\n"
    assert Path(output).read_text().startswith(begins)
    assert [p.name for p in Path.cwd().iterdir()] == [output]


def test_plots_of_pages_have_no_pictures(plan_file: Path) -> None:
    said = errors("plot", str(plan_file), "-o", "plot.html", "--picture", "curve", code=2)
    assert "a .html file always holds the same" in " ".join(said.split())
    assert not Path("plot.html").exists()


@pytest.mark.parametrize("picture", ["memory", "curve", "schedule"])
def test_plot_a_picture(plan_file: Path, picture: str) -> None:
    pytest.importorskip("matplotlib")
    run("plot", str(plan_file), "-o", f"{picture}.svg", "--picture", picture)
    assert b"<svg" in Path(f"{picture}.svg").read_bytes()


@pytest.mark.parametrize("measure", ["--measure", "--no-measure"])
def test_plot_a_model_beside_what_was_measured(measure: str) -> None:
    """On the curve, with PyTorch's checkpointing."""
    pytest.importorskip("matplotlib")
    run("plot", MLP, "-b", "50%", "-o", "report.html", "--time-limit", "0.5", measure)
    pictures = re.findall('base64,([^"]*)"', Path("report.html").read_text())
    curve = base64.b64decode(pictures[0]).decode()
    assert "rockplan (predicted)" in curve and "this plan (predicted)" in curve
    peers = ("rockplan (measured)", "eager (measured)", "checkpoint_sequential (measured)")
    assert {peer in curve for peer in peers} == {measure == "--measure"}


@pytest.mark.parametrize("output", ["plan", "plan.gif", "plan.json", "absent/plan.svg"])
def test_plot_refuses_other_files(plan_file: Path, output: str) -> None:
    assert output in errors("plot", str(plan_file), "-o", output, code=ExitCode.USAGE)
    assert "--budget" in errors("plot", str(plan_file), "-b", "1MB", code=ExitCode.USAGE)


def test_plot_without_matplotlib_says_what_to_install(
    plan_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    found = errors("plot", str(plan_file), "-o", "plan.svg", code=ExitCode.USAGE)
    assert "pip install 'rockplan[plot]'" in found


def test_solve_traces_the_stages_of_the_search() -> None:
    shown = run("solve", TRANSFORMER, "-b", "60%", "--no-cache", "--trace")
    heading, first = shown[shown.index("search for 60%") :].splitlines()[1:3]
    assert heading.split() == ["stage", "overhead", "proven", "peak", "seconds"]
    assert first.startswith("keep-all ") and " - " in first
    run("solve", TRANSFORMER, "-b", "60%")
    assert "no stage ran" in run("solve", TRANSFORMER, "-b", "60%", "--trace")
