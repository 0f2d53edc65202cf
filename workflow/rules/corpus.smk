# blacklist -> scrape, ingest -> clean -> dedup (its phases are in dedup.smk) -> decontaminate -> tokenize -> merge_index.
# One job per shard, except for steps that need all shards.

from shlex import quote


rule blacklist:
    input:
        urls=lambda wildcards: settings.url_files(),
        lists=settings.blacklist.domain_lists,
    output:
        shards=expand(RUN / "urls/{shard}.txt", shard=SHARDS),
        rejects=RUN / "urls/rejects/all.jsonl.zst",
        stats=RUN / "urls/stats.json",
    log:
        RUN / "logs/blacklist.log",
    benchmark:
        RUN / "benchmarks/blacklist.tsv"
    threads: 4
    resources:
        mem_mb=4000,
        runtime=120,
    params:
        settings=rule_keys.blacklist(settings),
        folder=RUN / "urls",
        shards=settings.shards,
    shell:
        'python -m corpus.blacklist --config "$URLS_TO_GPT2_SETTINGS" --input {input.urls:q} '
        "--output-dir {params.folder:q} --shards {params.shards} --rejects {output.rejects:q} "
        "--stats {output.stats:q} --workers {threads} > {log:q} 2>&1"


rule scrape:
    input:
        urls=RUN / "urls/{shard}.txt",
        site=[settings.site / "site.json"] if settings.site else [],
    output:
        pages=RUN / "pages/{shard}.jsonl.zst",
        rejects=RUN / "pages/rejects/{shard}.jsonl.zst",
        stats=RUN / "pages/{shard}.stats.json",
    log:
        RUN / "logs/scrape/{shard}.log",
    benchmark:
        RUN / "benchmarks/scrape/{shard}.tsv"
    threads: 2
    resources:
        mem_mb=4000,
        runtime=7 * 24 * 60,
    params:
        settings=rule_keys.scrape(settings),
        # A recorded site is served on loopback while the step runs; demo.serve replaces ADDRESS by ip:port.
        serve=lambda wildcards, output: (
            f"python -m demo.serve --site {quote(str(settings.site))} --"
            if settings.site
            else ""
        ),
        resolve=lambda wildcards, output: (
            f"--resolve '*=ADDRESS' --site {quote(str(settings.site))}"
            if settings.site
            else ""
        ),
        archive=lambda wildcards, output: (
            f"--archive {quote(f'{RUN}/pages/{wildcards.shard}.warc.gz')}"
            if settings.scrape.archive
            else ""
        ),
    shell:
        '{params.serve} python -m corpus.scrape --config "$URLS_TO_GPT2_SETTINGS" --urls {input.urls:q} '
        "--output {output.pages:q} --rejects {output.rejects:q} --stats {output.stats:q} --workers {threads} "
        "--allow-empty {params.resolve} {params.archive} > {log:q} 2>&1"


rule ingest:
    input:
        lambda wildcards: settings.source_files(),
    output:
        shards=expand(RUN / "ingest/{shard}.jsonl.zst", shard=SHARDS),
        stats=RUN / "ingest/stats.json",
    log:
        RUN / "logs/ingest.log",
    benchmark:
        RUN / "benchmarks/ingest.tsv"
    resources:
        mem_mb=2000,
        runtime=24 * 60,
    params:
        settings=rule_keys.ingest(settings),
        folder=RUN / "ingest",
        shards=settings.shards,
    shell:
        'python -m corpus.ingest --config "$URLS_TO_GPT2_SETTINGS" --output-dir {params.folder:q} '
        "--shards {params.shards} --stats {output.stats:q} > {log:q} 2>&1"


rule clean:
    input:
        [RUN / "pages/{shard}.jsonl.zst"] if settings.urls else [],
        [RUN / "ingest/{shard}.jsonl.zst"] if settings.sources else [],
    output:
        documents=RUN / "clean/{shard}.jsonl.zst",
        rejects=RUN / "clean/rejects/{shard}.jsonl.zst",
        stats=RUN / "clean/{shard}.stats.json",
    log:
        RUN / "logs/clean/{shard}.log",
    benchmark:
        RUN / "benchmarks/clean/{shard}.tsv"
    resources:
        mem_mb=2000,
        runtime=240,
    params:
        settings=rule_keys.clean(settings),
    shell:
        'python -m corpus.clean --config "$URLS_TO_GPT2_SETTINGS" --input {input:q} --output {output.documents:q} '
        "--rejects {output.rejects:q} --stats {output.stats:q} --workers {threads} --allow-empty > {log:q} 2>&1"


# The folder of the final documents.
DOCUMENTS = RUN / ("decontaminate" if settings.decontaminate.files else "dedup")

if settings.decontaminate.files:
    EVALUATION_FILES = settings.evaluation_files()

    rule decontaminate_count:
        input:
            documents=RUN / "dedup/{shard}.jsonl.zst",
            files=EVALUATION_FILES,
        output:
            counts=RUN / "decontaminate/{shard}.counts.json",
        log:
            RUN / "logs/decontaminate_count/{shard}.log",
        benchmark:
            RUN / "benchmarks/decontaminate_count/{shard}.tsv"
        resources:
            mem_mb=4000,
            runtime=240,
        params:
            settings=rule_keys.decontaminate_count(settings),
        shell:
            'python -m corpus.decontaminate count --config "$URLS_TO_GPT2_SETTINGS" --input {input.documents:q} '
            "--output {output.counts:q} --workers {threads} > {log:q} 2>&1"

    rule decontaminate:
        input:
            documents=RUN / "dedup/{shard}.jsonl.zst",
            counts=expand(RUN / "decontaminate/{shard}.counts.json", shard=SHARDS),
            files=EVALUATION_FILES,
        output:
            documents=RUN / "decontaminate/{shard}.jsonl.zst",
            rejects=RUN / "decontaminate/rejects/{shard}.jsonl.zst",
            stats=RUN / "decontaminate/{shard}.stats.json",
        log:
            RUN / "logs/decontaminate/{shard}.log",
        benchmark:
            RUN / "benchmarks/decontaminate/{shard}.tsv"
        resources:
            mem_mb=4000,
            runtime=240,
        params:
            settings=rule_keys.decontaminate(settings),
            counts=RUN / "decontaminate",
            shards=len(SHARDS),
        shell:
            'python -m corpus.decontaminate cut --config "$URLS_TO_GPT2_SETTINGS" --input {input.documents:q} '
            "--counts {params.counts:q} --shards {params.shards} --output {output.documents:q} "
            "--rejects {output.rejects:q} --stats {output.stats:q} --workers {threads} --allow-empty > {log:q} 2>&1"


if settings.train_tokenizer.vocab_size:

    rule train_tokenizer:
        input:
            expand(DOCUMENTS / "{shard}.jsonl.zst", shard=SHARDS),
        output:
            encoder=settings.tokenize.encoder_json,
            merges=settings.tokenize.vocab_bpe,
            stats=RUN / "tokenizer/stats.json",
        log:
            RUN / "logs/train_tokenizer.log",
        benchmark:
            RUN / "benchmarks/train_tokenizer.tsv"
        threads: 4
        resources:
            mem_mb=8000,
            runtime=24 * 60,
        params:
            settings=rule_keys.train_tokenizer(settings),
            folder=RUN / "tokenizer",
        shell:
            'python -m corpus.train_tokenizer --config "$URLS_TO_GPT2_SETTINGS" --input {input:q} '
            "--output-dir {params.folder:q} --stats {output.stats:q} --workers {threads} > {log:q} 2>&1"


rule tokenize:
    input:
        documents=DOCUMENTS / "{shard}.jsonl.zst",
        vocabulary=[
            path
            for path in (settings.tokenize.encoder_json, settings.tokenize.vocab_bpe)
            if path
        ],
    output:
        bin=RUN / "tokens/{shard}_text_document.bin",
        idx=RUN / "tokens/{shard}_text_document.idx",
        meta=RUN / "tokens/{shard}_text_document.json",
        rejects=RUN / "tokens/rejects/{shard}.jsonl.zst",
        stats=RUN / "tokens/{shard}.stats.json",
    log:
        RUN / "logs/tokenize/{shard}.log",
    benchmark:
        RUN / "benchmarks/tokenize/{shard}.tsv"
    resources:
        mem_mb=2000,
        runtime=120,
    params:
        settings=rule_keys.tokenize(settings),
        prefix=lambda wildcards: RUN / "tokens" / wildcards.shard,
    shell:
        'python -m corpus.tokenize --config "$URLS_TO_GPT2_SETTINGS" --input {input.documents:q} '
        "--output-prefix {params.prefix:q} --rejects {output.rejects:q} --stats {output.stats:q} "
        "--workers {threads} --allow-empty > {log:q} 2>&1"


rule merge_index:
    input:
        idx=expand(RUN / "tokens/{shard}_text_document.idx", shard=SHARDS),
        bin=expand(RUN / "tokens/{shard}_text_document.bin", shard=SHARDS),
        meta=expand(RUN / "tokens/{shard}_text_document.json", shard=SHARDS),
    output:
        bin=f"{settings.dataset_prefix}.bin",
        idx=f"{settings.dataset_prefix}.idx",
        meta=f"{settings.dataset_prefix}.json",
        stats=RUN / "dataset/stats.json",
    log:
        RUN / "logs/merge_index.log",
    benchmark:
        RUN / "benchmarks/merge_index.tsv"
    resources:
        mem_mb=2000,
        runtime=240,
    params:
        folder=RUN / "tokens",
        shards=len(SHARDS),
        prefix=settings.dataset_prefix,
    shell:
        "python -m corpus.merge_index --inputs {params.folder:q} --shards {params.shards} "
        "--output-prefix {params.prefix:q} --stats {output.stats:q} > {log:q} 2>&1"


rule corpus:
    input:
        expand(DOCUMENTS / "{shard}.jsonl.zst", shard=SHARDS),


rule dataset:
    input:
        rules.merge_index.output,
