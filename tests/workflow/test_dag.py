import re
import subprocess
import sys
from pathlib import Path

import pytest

from common.config import load_settings
from tests.conftest import ROOT
from tests.training.helpers import byte_documents, write_corpus

MODELS = ("tiny", "gpt2_124m", "gpt2_345m", "gpt2_7b")


def snakemake(*arguments: str, cwd: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    """Run Snakemake on our Snakefile; results are written below `cwd`."""
    return subprocess.run(
        [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder with our configuration and profiles, and no results."""
    for name in ("config.yaml", "profiles", "slurm", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def jobs(output: str) -> dict[str, int]:
    """The job counts of a dry run."""
    table = output[output.index("Job stats:") :].split("\n\n")[0].splitlines()[3:]
    return {row.split()[0]: int(row.split()[1]) for row in table}


EXPECTED = {
    "all": 1, "blacklist": 1, "clean": 2, "dedup": 2, "dedup_bands_0": 1, "dedup_clusters": 1, "dedup_signatures": 2,
    "dedup_signed": 1,
    "dedup_verify_0": 1, "demo_site": 1, "evaluate": 1, "generate": 1, "merge": 1, "merge_index": 1, "report": 1,
    "scrape": 2, "tokenize": 2, "total": 24, "train": 1, "train_tokenizer": 1,
}  # fmt: skip


@pytest.mark.parametrize("profile", [(), ("--profile", "slurm")])
def test_the_whole_dag_is_planned_alike_here_and_on_slurm(folder: Path, profile: tuple[str, ...]) -> None:
    result = snakemake("-n", "all", *profile, cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    assert jobs(result.stdout) == EXPECTED
    assert "reason: Missing output files" in result.stdout, "a dry run explains itself"


@pytest.mark.parametrize("target", ["corpus", "dataset", "report", *(f"train_{m}" for m in MODELS)])
def test_every_target_is_planned(folder: Path, target: str) -> None:
    result = snakemake("-n", target, "--config", "cluster={executor: slurm, gpus_per_node: 8}", cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    assert ("train" in jobs(result.stdout)) == (target not in ("corpus", "dataset"))


@pytest.mark.parametrize("dry_run", [("-n",), ()])
def test_a_model_that_is_too_large_is_refused_before_its_corpus_is_built(
    folder: Path, dry_run: tuple[str, ...]
) -> None:
    cluster = "cluster={executor: slurm, mem_gb_per_task: 1}"
    result = snakemake("train_gpt2_345m", *dry_run, "--config", cluster, cwd=folder)
    (line,) = [line for line in result.stderr.splitlines() if line.startswith(("error", "Traceback", "Exception"))]
    assert result.returncode == 2 and "rule demo_site" not in result.stdout + result.stderr
    assert line.startswith("error: models.gpt2_345m needs ") and "raise cluster.mem_gb_per_task" in line
    assert not (folder / "results").exists()


def test_a_model_that_is_trained_already_is_not_judged_again(folder: Path) -> None:
    done = folder / "results/demo/models/gpt2_345m/done.json"
    done.parent.mkdir(parents=True)
    done.write_text("{}")
    result = snakemake("-n", "train_gpt2_345m", cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr


def test_merge_targets_exist_for_every_model(folder: Path) -> None:
    listed = snakemake("--list-target-rules", cwd=folder)
    assert {f"merge_{m}" for m in MODELS} <= set(listed.stdout.split()) | set(listed.stderr.split())


def test_lint_finds_nothing_but_the_missing_containers(folder: Path) -> None:
    result = snakemake("--lint", cwd=folder)
    findings = [line.strip() for line in (result.stdout + result.stderr).splitlines() if line.lstrip().startswith("* ")]
    assert findings and all("Specify a conda environment or container" in finding for finding in findings), findings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("scrpe={}", "config.yaml: unknown key 'scrpe' (did you mean 'scrape'?)"),
        ("shards=0", "shards: must be greater than 0"),
        ("urls=[none.txt]", "config.yaml: urls: none.txt: no such file or folder"),
    ],
)
def test_a_wrong_configuration_stops_before_any_job_and_says_why(folder: Path, change: str, message: str) -> None:
    result = snakemake("all", "--config", change, cwd=folder)
    assert result.returncode != 0
    assert message in result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    assert not (folder / "results/demo/urls").exists()


def test_sources_take_the_place_of_the_scrape_or_stand_beside_it(folder: Path) -> None:
    (folder / "texts").mkdir()
    result = snakemake("-n", "dataset", "--config", "sources=[{path: texts}]", cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    both = jobs(result.stdout)
    assert both["ingest"] == 1 and both["scrape"] == both["clean"] == 2
    result = snakemake("-n", "all", "--config", "sources=[{path: texts}]", "urls=[]", cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    alone = jobs(result.stdout)
    assert alone["ingest"] == 1 and alone["clean"] == 2 and not {"scrape", "blacklist", "demo_site"} & alone.keys()
    result = snakemake("-n", "all", "--config", "sources=[{path: none}]", cwd=folder)
    assert "sources: none: no such file or folder" in result.stdout + result.stderr


def test_a_model_with_data_of_its_own_needs_no_corpus_and_one_beside_the_corpus_both(folder: Path) -> None:
    write_corpus(folder / "books", byte_documents(3))
    lines = (ROOT / "config.yaml").read_text()
    own = "data: [{prefix: books, weight: 1}]"
    (folder / "own.yaml").write_text(
        "run: results/own\ntrain_models: [tiny]\nmodels: {tiny: {model: {n_layer: 1, n_head: 1, n_embd: 8}, "
        f"train: {{iterations: 1}}, {own}}}}}\n"
    )
    result = snakemake("-n", "all", "--configfile", "own.yaml", cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    assert jobs(result.stdout) == {
        **dict.fromkeys(("all", "train", "merge", "evaluate", "generate", "report"), 1),
        "total": 6,
    }
    corpus = "{prefix: results/demo/dataset/corpus_text_document, weight: 3}"
    (folder / "both.yaml").write_text(
        lines.replace("    parallel: {tensor: 2}\n", f"    parallel: {{tensor: 2}}\n    {own[:-1]}, {corpus}]\n")
    )
    result = snakemake("-n", "all", "--configfile", "both.yaml", cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    assert jobs(result.stdout) == EXPECTED
    (folder / "books.idx").unlink()
    result = snakemake("-n", "all", "--configfile", "both.yaml", cwd=folder)
    assert "models.tiny.data: books.idx: no such file; give the PREFIX" in result.stdout + result.stderr


@pytest.mark.slow
def test_a_model_that_starts_from_another_one_waits_for_its_merge(folder: Path) -> None:
    write_corpus(folder / "books", byte_documents(3))
    model = "{model: {n_layer: 1, n_head: 1, n_embd: 8}, train: {iterations: 1}, data: [{prefix: books, weight: 1}]"
    (folder / "two.yaml").write_text(
        f"run: results/two\ntrain_models: [second]\nmodels:\n  first: {model}}}\n"
        f"  second: {model}, finetune: results/two/merged/first}}\n"
    )
    result = snakemake("-n", "train_second", "--configfile", "two.yaml", cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    assert jobs(result.stdout) == {"merge": 1, "train": 2, "train_second": 1, "total": 4}


def test_decontamination_is_planned_when_evaluation_sets_are_named(folder: Path) -> None:
    (folder / "set.jsonl").write_text("{}")
    result = snakemake("-n", "all", "--config", "decontaminate={files: [set.jsonl]}", cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    assert jobs(result.stdout) == {
        **EXPECTED,
        "decontaminate_count": 2,
        "decontaminate_sum": 1,
        "decontaminate": 2,
        "total": EXPECTED["total"] + 5,
    }
    result = snakemake("-n", "all", "--config", "decontaminate={files: [none]}", cwd=folder)
    assert "decontaminate.files: none: no such file or folder" in result.stdout + result.stderr


def test_a_vocabulary_is_trained_on_all_shards_before_any_is_tokenized(folder: Path) -> None:
    wanted = ("train_tokenizer={vocab_size: 1000}", "train_models=[]")  # the models have the default vocabulary
    result = snakemake("-n", "dataset", "--config", *wanted, cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    planned = jobs(result.stdout)
    assert planned["train_tokenizer"] == 1 and planned["tokenize"] == 2
    rules = [line.split()[-1].rstrip(":") for line in result.stdout.splitlines() if line.startswith("rule ")]
    assert max(n for n, rule in enumerate(rules) if rule == "dedup") < rules.index("train_tokenizer")
    assert rules.index("train_tokenizer") < rules.index("tokenize")


@pytest.mark.parametrize("shards", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_the_real_configuration_plans_its_thousand_shards(folder: Path, shards: int) -> None:
    lines = (ROOT / "configs/openwebtext.yaml").read_text()
    assert "shards: 1000 " in lines
    (folder / "real.yaml").write_text(lines.replace("shards: 1000 ", f"shards: {shards} "))
    (folder / "data/urls").mkdir(parents=True)
    (folder / "data/urls/a.txt").write_text("http://site.example/page\n")
    command = ("all", "--configfile", "real.yaml", "--profile", "slurm")
    for dry_run in ((), ("-n",)):
        result = snakemake(*dry_run, *command, cwd=folder)
        assert result.returncode == 2 and result.stderr.count("scrape.contact is empty") == 1, result.stderr
    assert not (folder / "results").exists()
    result = snakemake("-n", *command, "--config", "scrape={contact: me@site.example}", cwd=folder)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    assert jobs(result.stdout)["scrape"] == shards
    assert {f"dedup_bands_{job}" for job in range(8)} < jobs(result.stdout).keys()
    minutes = re.findall(r"^\w+(?: +\d+){5} +(\d+) +the default$", result.stdout, re.MULTILINE)
    limits = [model.time_limit_minutes for model in load_settings(folder / "real.yaml").models.values()]
    assert len(minutes) > 10 and max(*map(int, minutes), *limits) <= 1440, "many sites allow a day"


PLAN = """import resource, subprocess, sys
code = subprocess.run([sys.executable, "-m", "snakemake", *sys.argv[1:]]).returncode
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print("used", used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)
sys.exit(code)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("shards", "seconds", "megabytes"), [(2000, 25, 500), (10000, 60, 1000)])
def test_ten_thousand_shards_are_planned_in_a_minute_and_a_gigabyte(
    folder: Path, shards: int, seconds: int, megabytes: int
) -> None:
    """CPU time, because other work may run beside it."""
    (folder / "Snakefile").symlink_to(ROOT / "Snakefile")
    (folder / "workflow").symlink_to(ROOT / "workflow")
    (folder / "texts").mkdir()
    (folder / "big.yaml").write_text(f"run: results/x\nshards: {shards}\nsources: [{{path: texts}}]\n")
    command = [sys.executable, "-c", PLAN, "-n", "dataset", "--configfile", "big.yaml"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1800, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    assert jobs(result.stdout)["tokenize"] == shards
    cpu, memory = map(float, result.stdout.split("used ")[-1].split())
    assert cpu < seconds and memory < megabytes * 1e6, (cpu, memory)
