"""Claim: every command does its part of the flow, and a mistake ends with one message, status 2 and no traceback; for a
misspelt name it has the name that was meant.
"""

import json
import subprocess
import sys
from pathlib import Path
from textwrap import fill
from typing import Any

import pytest
import yaml

import lightning_amp
from lightning_amp.cli.commands.demo import run_demo
from lightning_amp.cli.main import TRAINING, main
from lightning_amp.cli.verbs import VERBS
from lightning_amp.data.prepare.synthetic import synthesize
from lightning_amp.errors import DataError, DoesNotFitError

SHAPE = "anchors=120,dim=8,strata=3,batch=2,window=16"


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    out = tmp_path_factory.mktemp("cli") / "data"
    synthesize(out, cells=24, bins=30, strata=3, genes=20, seed=1)
    return out


def test_profile_and_plan_print_tables_and_json(data_dir, capsys) -> None:
    assert main(["profile", str(data_dir)]) == 0
    assert "3 strata" in " ".join(capsys.readouterr().out.split())
    assert main(["profile", str(data_dir), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == 1
    arguments = ["--devices", "2", "--device-memory", "24GiB", "--policy", "paper", "--strategies", "S1,S3"]
    assert main(["plan", str(data_dir), *arguments, "--batch-size", "8", "--format", "json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["strategies"] == ["S1", "S3"]
    assert made["budget_bytes"] == 24 * 2**30
    assert made["batch_size"] == 8
    # these are not looked for
    assert [made[name] for name in ("would_help", "largest_batch", "fewest_devices")] == [None] * 3
    assert main(["plan", str(data_dir), "--keys", "full_attention"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "full attention, of an anchor to all 30 (declared by FullAttention)" in text
    assert main(["plan", str(data_dir), "--policy", "paper", "--keys", "convolution", "--window", "10"]) == 0
    text = capsys.readouterr().out
    assert "single-device execution" in text
    assert max(map(len, text.splitlines())) <= max(80, len(str(data_dir)) + len("Profile of "))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["profile", "absent"], "absent"),
        (["plan", "absent", "--devices", "0"], "devices=0"),
        (["plan", "absent", "--model-parallel-size", "x"], "model_parallel_size='x'"),
        (
            ["plan", "absent", "--recommend-devices", "--model-parallel-size", "2"],
            "cannot be used with --model-parallel-size",
        ),
        (["plan", "absent", "--recommend-devices", "--shape", "x"], "cannot be used with --shape"),
        (["plan", "--recommend-devices"], "requires DIR"),
        (["plan", "absent", "--recommend-devices", "--device-memory", "8 apples"], "'8 apples'"),
        (["plan", "absent", "--device", "A100", "--rates", "r.json"], "give one of them"),
        (["plan", "absent", "--device", "abacus"], "rates of 'abacus' are not known"),
        (["plan", "absent", "--shape", "anchors=9,dim=4,strata=2"], "both DIR='absent' and shape='anchors=9"),
        (["plan", "--shape", "anchors=9,dim=4,strata=2", "--window", "4"], "cannot be used with --window"),
        (["plan", "--shape", "anchors=9,dim=4,strata=2,batch=1", "--batch-size", "4"], "give one of them"),
        (["plan"], "neither DIR nor --shape"),
        (["simulate"], "got neither DIR nor --shape; give one of them"),
        (["simulate", "data", "--shape", SHAPE], "got both DIR='data' and shape="),
        (["simulate", "--shape", SHAPE, "--batch-size", "8"], "batch=2 in --shape cannot be used with --batch-size 8"),
        (["simulate", "--shape", SHAPE, "--latent-dim", "8", "--keys", "attention"], "--latent-dim, --keys"),
        (["simulate", "--shape", SHAPE, "--plot", "absent/memory.png"], "its folder does not exist"),
        (["simulate", "--shape", SHAPE, "--plot", "memory.pdf"], "the name of a PNG file"),
        (["simulate", "--shape", SHAPE, "--plot", "locked.png"], "'locked.png' cannot be written"),
        (["simulate", "--shape", SHAPE, "--devices", "1025", "--strategies", "S2"], "a model axis of 1,025 ranks"),
        (["simulate", "--shape", SHAPE, "--model-parallel-size", "9" * 5000], "model_parallel_size="),
        (["simulate", "absent"], "absent"),
        (["prepare", "--hic", "a", "--rna", "b", "--genes", "c", "--strata", "0", "--out", "d"], "strata"),
    ],
)
def test_mistakes_end_with_status_2_and_one_line(words, message, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "locked.png").touch()
    # whoever runs the tests may be allowed everything
    monkeypatch.setattr("os.access", lambda path, mode: "locked" not in str(path))
    assert main(words) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("lightning-amp: error: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["locked.png"]


@pytest.mark.parametrize("verb", VERBS)
def test_every_command_says_what_it_does_and_gives_an_example(verb, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    usage, _, rest = text.partition("\n\n")
    assert usage.startswith(f"usage: lightning-amp {verb} ")
    assert len(usage.splitlines()) < 20
    example = f"example:\n  lightning-amp {verb} {VERBS[verb][2]}\n"
    if verb in TRAINING:  # with Lightning's line breaks
        rest, example = " ".join(rest.split()), " ".join(example.split())
        assert rest.startswith(VERBS[verb][1])
    else:
        assert rest.startswith(fill(VERBS[verb][1], 78))
        assert max(map(len, text.splitlines())) <= 80
    assert example in rest


@pytest.mark.long
def test_the_package_runs_as_a_module(data_dir) -> None:
    for words, status in ((["profile", str(data_dir)], 0), (["profile", "absent"], 2)):
        command = [sys.executable, "-m", "lightning_amp", *words]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ran.returncode == status
        assert ("strata" in ran.stdout) == (status == 0)
        assert ran.stderr.count("\n") == status // 2


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "lightning_amp", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=240)


def config(data_dir: Path, **trainer: object) -> dict:
    return {
        "seed_everything": 1,
        "trainer": {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False} | trainer,
        "model": {"class_path": "lightning_amp.GLUE", "init_args": {"latent_dim": 8, "window": 8}},
        "data": {
            "class_path": "lightning_amp.SingleCellDataModule",
            "init_args": {"data_dir": str(data_dir), "batch_size": 8},
        },
    }


@pytest.mark.ranks
def test_fit_from_yaml_by_class_path(data_dir, tmp_path) -> None:
    """The demo and `last` of predict are by name."""
    by_path = {"class_path": "lightning_amp.AMPStrategy", "init_args": {"policy": "paper", "strategies": "S1,S3,S4"}}
    file = tmp_path / "path.yaml"
    file.write_text(yaml.safe_dump(config(data_dir, strategy=by_path)))
    done = run("fit", "--config", str(file), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "S3 chunked attention" in done.stdout + done.stderr


@pytest.mark.ranks
def test_fit_with_a_mistake_ends_with_status_2(data_dir, tmp_path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config(tmp_path / "absent")))
    done = run("fit", "--config", str(file), cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "absent" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_a_mistake_inside_yaml_is_found_under_jsonargparse(data_dir, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = config(data_dir)
    wrong["data"]["init_args"]["batch_size"] = 0
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(wrong))
    assert main(["fit", "--config", str(file)]) == 2
    assert "batch_size=0" in capsys.readouterr().err
    assert yaml.safe_load(file.read_text()) == wrong


def test_predictions_need_a_checkpoint(capsys) -> None:
    assert main(["predict", "--config", "config.yaml"]) == 2
    assert "predict requires --ckpt_path" in capsys.readouterr().err


def test_the_demo_refuses_a_folder_that_is_not_its_own(tmp_path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(DataError, match="holds files that no demo wrote"):
        list(run_demo(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


GOOD = """
trainer:
  accelerator: cpu
  strategy: amp
  max_epochs: 1
model:
  class_path: lightning_amp.GLUE
data:
  class_path: lightning_amp.SingleCellDataModule
  init_args: {data_dir: data, batch_size: 4}
"""
MISTAKES = {
    "strategy: amp": ("strategy: ampp", "strategy 'ampp' is not supported; allowed are ['amp', ", "'amp'"),
    "max_epochs": ("max_epoch", "'trainer.max_epoch' was set; fit has nothing of that", "'trainer.max_epochs'"),
    "trainer:": ("trainr:", "'trainr.accelerator' was set", "'trainer.accelerator'"),
    "batch_size": ("batchsize", "'batchsize' was given to lightning_amp.SingleCellDataModule", "'batch_size'"),
    "lightning_amp.GLUE": ("lightning_amp.GLEU", "the class 'lightning_amp.GLEU' does not exist", "'GLUE'"),
    "amp\n": (
        "\n    class_path: lightning_amp.AMPStrategy\n    init_args: {polcy: paper}\n",
        "'polcy' was given to lightning_amp.AMPStrategy",
        "'policy'",
    ),
}


def said_of(text: str, words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    (folder / "run.yaml").write_text(text)
    assert main([*words, "--config", str(folder / "run.yaml")]) == 2
    return capsys.readouterr().err


@pytest.fixture(autouse=True)
def _words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-amp"])


@pytest.mark.parametrize("right", MISTAKES)
def test_a_misspelt_name_is_told_with_the_nearest(
    right: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong, text, nearest = MISTAKES[right]
    said = said_of(GOOD.replace(right, wrong, 1), ["fit"], tmp_path, capsys)
    assert said.startswith(f"lightning-amp: error: {text}")
    assert said.endswith(f". Did you mean {nearest}?\n")
    assert len(said.splitlines()) == 1


def test_a_missing_configuration_is_told_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("fit", "validate"):
        assert main([verb]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"lightning-amp: error: --config is missing: lightning-amp {verb} --config FILE.yaml")
        assert len(said.splitlines()) == 1


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"lightning-amp {lightning_amp.__version__}\n"


def test_verify_reads_the_same_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = said_of(GOOD.replace("max_epochs", "max_epoch"), ["verify"], tmp_path, capsys)
    assert "Did you mean 'trainer.max_epochs'?" in said


def printed(text: str, words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    (folder / "run.yaml").write_text(text)
    with pytest.raises(SystemExit) as ended:
        main([*words[:1], "--config", str(folder / "run.yaml"), *words[1:], "--print_config"])
    assert ended.value.code == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_options_of_the_strategy_are_taken_beside_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unnamed, given = (
        GOOD.replace("  strategy: amp\n", ""),
        GOOD.replace("y: amp\n", "y: {class_path: lightning_amp.AMPStrategy, init_args: {rescue: true}}\n"),
    )
    option = ["--trainer.strategy.device_memory", "20MiB"]
    for text, start in ((GOOD, "popen"), (unnamed, "popen"), (GOOD.replace("amp\n", "amp_spawn\n", 1), "spawn")):
        strategy = printed(text, ["fit", *option], tmp_path, capsys)["trainer"]["strategy"]
        assert strategy["class_path"] == "lightning_amp.AMPStrategy"
        assert strategy["init_args"]["device_memory"] == "20MiB"
        assert strategy["init_args"]["start_method"] == start
    strategy = printed(given, ["fit", "=".join(option)], tmp_path, capsys)["trainer"]["strategy"]
    assert strategy["init_args"]["device_memory"] == "20MiB"
    assert strategy["init_args"]["rescue"] is True
    said = said_of(GOOD.replace("amp\n", "ddp\n", 1), ["fit", *option], tmp_path, capsys)
    assert "'--trainer.strategy.device_memory' was set, and strategy 'ddp' has no options" in said
    said = said_of(GOOD, ["fit", "--trainer.strategy.device_memry=20MiB"], tmp_path, capsys)
    assert "Did you mean 'device_memory'?" in said


def test_classes_are_found_in_the_current_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_model.py").write_text("from lightning_amp import GLUE\n\n\nclass Own(GLUE): ...\n")
    monkeypatch.chdir(tmp_path)
    # a console script has its own folder there instead of the current one
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    config = printed(GOOD.replace("lightning_amp.GLUE", "own_model.Own"), ["fit"], tmp_path, capsys)
    assert config["model"]["class_path"] == "own_model.Own"


def test_fit_ends_with_3_where_nothing_fits_as_plan_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(words: list[str]) -> None:
        raise DoesNotFitError("out of memory is predicted")

    monkeypatch.setattr("lightning_amp.cli.commands.train.train", refuse)
    assert main(["fit", "--config", "config.yaml"]) == 3
    assert capsys.readouterr().err == "lightning-amp: error: out of memory is predicted\n"
