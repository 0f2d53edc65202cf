# The last corpus step, after which all statistics exist; empty if all models bring their data.
CORPUS = [rules.merge_index.output.stats] if settings.urls or settings.sources else []


# One HTML file about the run: the documents that each step kept, the loss, a generated sample. It
# opens the dataset's index: 20 bytes per document.
rule report:
    input:
        stats=CORPUS,
        models=expand(
            [result("train"), result("evaluate"), result("generate")],
            model=settings.models_of_all,
        ),
    output:
        page=RUN / "report.html",
    log:
        RUN / "logs/report.log",
    resources:
        **needs("report", 2000, minutes=10),
    shell:
        'python -m workflow.report --run {RUN:q} --config "$URLS_TO_GPT2_SETTINGS" --output {output.page:q} > {log:q} 2>&1'


# Dataset card, and per trained model a model card and the public summary of training content. Not
# part of `all`, because only published runs need them.
rule cards:
    input:
        stats=CORPUS,
        models=expand(
            [result("train"), result("evaluate")], model=settings.models_of_all
        ),
    output:
        [RUN / "cards/README.md"] if CORPUS else [],
        expand(RUN / "cards/models/{model}/README.md", model=settings.models_of_all),
    log:
        RUN / "logs/cards.log",
    resources:
        **needs("cards", 4000, minutes=60),
    shell:
        "python -m workflow.cards --run {RUN:q} > {log:q} 2>&1"
