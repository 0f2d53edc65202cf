# One HTML file about the run: the documents that each step kept, the loss, a generated sample.


CORPUS_STATS = [
    *([rules.blacklist.output.stats] if settings.urls else []),
    *([rules.ingest.output.stats] if settings.sources else []),
    *expand(
        RUN / "{step}/{shard}.stats.json",
        step=["pages"] * bool(settings.urls)
        + ["clean", "dedup", "tokens"]
        + ["decontaminate"] * bool(settings.decontaminate.files),
        shard=SHARDS,
    ),
    rules.merge_index.output.stats,
]


rule report:
    input:
        stats=CORPUS_STATS if settings.urls or settings.sources else [],
        models=expand(
            [
                RUN / "models/{model}/done.json",
                RUN / "evaluation/{model}.json",
                RUN / "samples/{model}.txt",
            ],
            model=settings.train_models,
        ),
    output:
        page=RUN / "report.html",
    log:
        RUN / "logs/report.log",
    benchmark:
        RUN / "benchmarks/report.tsv"
    resources:
        mem_mb=1000,
        runtime=10,
    params:
        run=RUN,
    shell:
        'python -m report --run {params.run:q} --config "$URLS_TO_GPT2_SETTINGS" --output {output.page:q} > {log:q} 2>&1'
