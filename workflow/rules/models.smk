# train -> merge -> evaluate, generate. Every model of the configuration has its own targets.

from shlex import join, quote

from workflow import job_memory


localrules:
    train,


def made_data(model, *suffixes):
    """The files of a model's datasets that rules of this run make."""
    return made_here(
        f"{source.prefix}.{suffix}"
        for source in settings.datasets(model)
        for suffix in suffixes
    )


def memory(estimate, *more):
    """The memory of a job after training, from the size of its model."""
    return lambda wildcards: estimate(settings.models[wildcards.model].model, *more)


def data_to_train(wildcards):
    check(checks.check_model, wildcards.model)
    return made_data(wildcards.model, "bin", "idx")


def start_of_training(wildcards):
    """The model to fine-tune, if there is one: merged by this workflow, or an existing one."""
    folder = settings.models[wildcards.model].finetune
    return [f"{folder}/config.json"] if folder else []


def data_to_evaluate(wildcards):
    if not Path(result("evaluate").format(model=wildcards.model)).exists():
        check(checks.check_evaluation)
    return made_data(wildcards.model, "idx")


# Only done.json is declared: Snakemake deletes declared outputs before a retry, not checkpoints.
rule train:
    input:
        data_to_train,
        start=start_of_training,
    output:
        done=result("train"),
    log:
        RUN / "logs/train/{model}.log",
    retries: 0  # a cancelled training stays cancelled
    # A local job uses the cores of this machine; for a Slurm job, the rule only waits.
    threads: workflow.cores if settings.cluster.executor == "local" else 1
    resources:
        mem_mb=1000,
        runtime=lambda wildcards: settings.models[wildcards.model].time_limit_minutes,
    params:
        settings=lambda wildcards: keys("train", wildcards.model),
        contents=lambda wildcards: contents(wildcards.model),
    # Snakemake sets OMP_NUM_THREADS to the cores of the whole job, which the ranks share.
    shell:
        "unset OMP_NUM_THREADS; "
        'python -m cluster.submit --config "$URLS_TO_GPT2_SETTINGS" --model {wildcards.model} --wait > {log:q} 2>&1'


rule merge:
    input:
        done=result("train"),
    output:
        # Not declared: the tokenizer, which some models lack, and training.json, by which --force
        # recognises its own folder.
        config=result("merge"),
        generation=RUN / "merged/{model}/generation_config.json",
        weights=RUN / "merged/{model}/model.safetensors",
    log:
        RUN / "logs/merge/{model}.log",
    resources:
        **needs("merge", memory(job_memory.merge_mb), minutes=60),
    shell:
        "python -m convert.merge_mp --checkpoint {RUN:q}/models/{wildcards.model} "
        "--output {RUN:q}/merged/{wildcards.model} --force > {log:q} 2>&1"


# The options of training.evaluate for lm-evaluation-harness
TASKS = f"--tasks {join(settings.evaluate.tasks)} " if settings.evaluate.tasks else ""
if settings.evaluate.task_dir:
    TASKS += f"--task-dir {quote(str(settings.evaluate.task_dir))} "
if settings.evaluate.max_samples:
    TASKS += f"--max-samples {settings.evaluate.max_samples}"


def task_files(wildcards):
    """The hash of each file of `evaluate.task_dir`, except what Python compiles there, for `params`."""
    folder = settings.evaluate.task_dir
    files = sorted(folder.rglob("*")) if folder else []
    return {
        str(path): sha256(path)
        for path in files
        if path.is_file() and path.suffix != ".pyc"
    }


rule evaluate:
    input:
        weights=RUN / "merged/{model}/model.safetensors",
        datasets=data_to_evaluate,
    output:
        result=result("evaluate"),
    log:
        RUN / "logs/evaluate/{model}.log",
    threads: 2
    resources:
        **needs(
            "evaluate",
            memory(job_memory.evaluate_mb, settings.evaluate.batch),
            minutes=240,
        ),
        gpu=lambda wildcards: (
            1 if settings.cluster_of(wildcards.model).gpus_per_node else 0
        ),
    params:
        settings=lambda wildcards: keys("evaluate", wildcards.model),
        datasets=lambda wildcards: [
            str(source.prefix) for source in settings.datasets(wildcards.model)
        ],
        task_files=task_files,
    shell:
        "python -m training.evaluate --checkpoint {RUN:q}/merged/{wildcards.model} --data {params.datasets:q} "
        "--split {params.settings[split]:q} --part valid --max-tokens {params.settings[evaluate][max_tokens]} --batch {settings.evaluate.batch} {TASKS} --output {output.result:q} > {log:q} 2>&1"


STOPS = " ".join(f"--stop={quote(text)}" for text in settings.generate.stop)
SOURCES = "--sources" if settings.generate.sources else ""


rule generate:
    input:
        weights=RUN / "merged/{model}/model.safetensors",
        datasets=lambda wildcards: (
            made_data(wildcards.model, "idx") if settings.generate.sources else []
        ),
    output:
        sample=result("generate"),
    log:
        RUN / "logs/generate/{model}.log",
    threads: 2
    resources:
        **needs("generate", memory(job_memory.generate_mb), minutes=60),
    params:
        settings=keys("generate"),
    shell:
        "python -m training.generate --checkpoint {RUN:q}/merged/{wildcards.model} --prompt={settings.generate.prompt:q} "
        "--max-tokens {params.settings[max_tokens]} --temperature {params.settings[temperature]} "
        "--top-k {params.settings[top_k]} --top-p {params.settings[top_p]} --repetition-penalty {params.settings[repetition_penalty]} --seed {params.settings[seed]} "
        "--samples {params.settings[samples]} {STOPS} {SOURCES} "
        "--output {output.sample:q} --allow-no-tokenizer > {log:q} 2>&1"


for name in settings.models:

    rule:
        name:
            f"train_{name}"
        input:
            expand(result("train"), model=name),

    rule:
        name:
            f"merge_{name}"
        input:
            expand([result("train"), result("merge")], model=name),
