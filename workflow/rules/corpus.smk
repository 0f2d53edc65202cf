# blacklist -> scrape, ingest -> clean -> dedup (its phases are in dedup.smk) -> repeats
# -> decontaminate -> tokenize -> merge_index.
# One job per shard, except for steps that need all shards.
#
# Planning 10,000 shards must be cheap: every declared file costs a kilobyte, and every pair of a
# reader and a file costs time. So a file is declared only if another rule reads it. A step writes
# all its files or none: one of them stands for the rejects and statistics beside it. A step that
# splits its input into shards (blacklist, ingest) declares its statistics, which it writes last.

from shlex import quote

from corpus.text.filters import filters


rule demo_site:
    # The embedded site of the default run; configurations with other URLs do not need it.
    output:
        urls=RUN / "site/urls.txt",
        site=RUN / "site/site.json",
    log:
        RUN / "logs/demo_site.log",
    resources:
        **needs("demo_site", 500, minutes=5),
    shell:
        "python -m workflow.demo.build --output {RUN:q}/site > {log:q} 2>&1"


# Files outside the run are no inputs of a rule, because Snakemake compares times. What blacklist and
# ingest read is compared by content (workflow/patches.py); the hashes of smaller files are params.
rule blacklist:
    input:
        made_here(settings.urls),
    output:
        rejects=rejects("blacklist"),
        stats=result("blacklist"),
    log:
        RUN / "logs/blacklist.log",
    threads: 4
    resources:
        **needs("blacklist", 4000, minutes=120),
    params:
        settings=keys("blacklist"),
        lists=hashes(settings.blacklist.domain_lists),
        urls=settings.urls,
        shards=settings.shards,
        known=known("blacklist"),
    shell:
        'python -m corpus.blacklist --config "$URLS_TO_GPT2_SETTINGS" --input {params.urls:q} '
        "--output-dir {RUN:q}/urls --shards {params.shards} --rejects {output.rejects:q} "
        "--stats {output.stats:q} --workers {threads} {params.known} {REMOVED} > {log:q} 2>&1"


def urls_to_fetch(wildcards):
    check(checks.check_contact)
    return result("blacklist")


ARCHIVE = SERVE = RESOLVE = ""
if settings.scrape.archive:
    ARCHIVE = "--archive {RUN:q}/pages/{wildcards.shard}.warc.gz"
# workflow.demo.serve serves a recorded site while the step runs, and replaces ADDRESS by ip:port.
if settings.site:
    SITE = f"--site {quote(str(settings.site))}"
    SERVE = f"python -m workflow.demo.serve {SITE} --"
    RESOLVE = f"{SITE} 'scrape.resolve={{\"*\": ADDRESS}}'"


rule scrape:
    input:
        urls=urls_to_fetch,
        site=[settings.site / "site.json"] if settings.site else [],
    output:
        pages=result("scrape"),
    log:
        RUN / "logs/scrape/{shard}.log",
    retries: 5  # each attempt continues from the journal
    threads: 2
    resources:
        **needs("scrape", 4000, minutes=24 * 60),
        resumes=1,
    params:
        settings=keys("scrape"),
        urls=f"{RUN}/urls/{{shard}}.txt",
        rejects=rejects("scrape"),
        stats=stats("scrape"),
        serve=SERVE,
        resolve=RESOLVE,
    shell:
        '{params.serve} python -m corpus.scrape --config "$URLS_TO_GPT2_SETTINGS" --urls {params.urls:q} '
        "--output {output.pages:q} --rejects {params.rejects:q} --stats {params.stats:q} --workers {threads} "
        "--allow-empty {params.resolve} " + ARCHIVE + " > {log:q} 2>&1"


if settings.remote_sources:

    # temp: when ingest runs again, fetch runs first. It fetches only files that are not there.
    rule fetch:
        output:
            fetched=temp(RUN / "fetch/fetched"),
        log:
            RUN / "logs/fetch.log",
        priority: 1  # as ingest
        retries: 5  # each attempt continues
        localrule: "fetch" not in settings.cluster.corpus.partitions
        resources:
            **needs("fetch", 2000, minutes=24 * 60),
        params:
            stats=result("fetch"),
        shell:
            'python -m corpus.fetch --config "$URLS_TO_GPT2_SETTINGS" --stats {params.stats:q} > {log:q} 2>&1 '
            "&& touch {output.fetched:q}"


def texts_to_read(wildcards):
    check(checks.check_sources)
    paths = (source.path for source in settings.sources if not source.is_remote)
    return [
        *made_here(paths),
        *(rules.fetch.output if settings.remote_sources else []),
    ]


# Opens every file.
HAS_PAGES = snakefile.or_exit(lambda: settings.has_pages)()


rule ingest:
    input:
        texts_to_read,
    output:
        stats=result("ingest"),
    log:
        RUN / "logs/ingest.log",
    priority: 1  # before scrape, so that an error in a source is known at once, not when days of fetching end
    threads: 2 if HAS_PAGES else 1
    resources:
        **needs("ingest", 4000 if HAS_PAGES else 2000, minutes=24 * 60),
    params:
        settings=keys("ingest"),
        shards=settings.shards,
        rejects=rejects("ingest"),
        known=known("ingest"),
    shell:
        'python -m corpus.ingest --config "$URLS_TO_GPT2_SETTINGS" --output-dir {RUN:q}/ingest '
        "--shards {params.shards} --rejects {params.rejects:q} --stats {output.stats:q} --workers {threads} "
        "{params.known} {REMOVED} > {log:q} 2>&1"


# A name that does not exist is an error before any job.
snakefile.or_exit(filters)(settings.clean)


rule clean:
    input:
        [result("scrape")] if settings.urls else [],
        [result("ingest")] if settings.sources else [],
    output:
        documents=result("clean"),
    log:
        RUN / "logs/clean/{shard}.log",
    resources:
        **needs("clean", 2000, minutes=240),
    params:
        settings=keys("clean"),
        models=hashes(model.path for model in settings.clean.fasttext),
        rejects=rejects("clean"),
        stats=stats("clean"),
        documents=[
            *([result("scrape")] if settings.urls else []),
            *([f"{RUN}/ingest/{{shard}}.jsonl.zst"] if settings.sources else []),
        ],
    shell:
        'python -m corpus.clean --config "$URLS_TO_GPT2_SETTINGS" --input {params.documents:q} --output {output.documents:q} '
        "--rejects {params.rejects:q} --stats {params.stats:q} --workers {threads} --allow-empty > {log:q} 2>&1"


if settings.repeats.units:

    rule repeats_count:
        input:
            documents=result("dedup"),
        output:
            units=result("repeats_count"),
        log:
            RUN / "logs/repeats_count/{shard}.log",
        resources:
            **needs("repeats_count", 2000, minutes=240),
        params:
            settings=keys("repeats_count"),
        shell:
            'python -m corpus.repeats count --config "$URLS_TO_GPT2_SETTINGS" --input {input.documents:q} '
            "--output {output.units:q} --workers {threads} > {log:q} 2>&1"

    rule repeats_sum:
        input:
            expand(rules.repeats_count.output.units, shard=SHARDS),
        output:
            repeats=result("repeats_sum"),
        log:
            RUN / "logs/repeats_sum.log",
        resources:
            **needs(
                "repeats_sum",
                1000 + int(1000 * settings.repeats.memory_gb),
                minutes=24 * 60,
            ),
        params:
            settings=keys("repeats_sum"),
            shards=len(SHARDS),
        shell:
            'python -m corpus.repeats sum --config "$URLS_TO_GPT2_SETTINGS" --units {RUN:q}/repeats/work '
            "--shards {params.shards} --output {output.repeats:q} > {log:q} 2>&1"

    rule repeats:
        input:
            documents=result("dedup"),
            repeats=result("repeats_sum"),
        output:
            documents=result("repeats"),
        log:
            RUN / "logs/repeats/{shard}.log",
        resources:
            **needs("repeats", 2000, minutes=240),
        params:
            settings=keys("repeats"),
            rejects=rejects("repeats"),
            stats=stats("repeats"),
        shell:
            'python -m corpus.repeats cut --config "$URLS_TO_GPT2_SETTINGS" --input {input.documents:q} '
            "--repeats {input.repeats:q} --output {output.documents:q} --rejects {params.rejects:q} "
            "--stats {params.stats:q} --workers {threads} --allow-empty > {log:q} 2>&1"


WITHOUT_REPEATS = result("repeats" if settings.repeats.units else "dedup")
# The final documents.
DOCUMENTS = result("decontaminate") if settings.decontaminate.files else WITHOUT_REPEATS

if settings.decontaminate.files:
    EVALUATION_FILES = hashes(settings.decontaminate.files)

    rule decontaminate_count:
        input:
            documents=WITHOUT_REPEATS,
        output:
            counts=result("decontaminate_count"),
        log:
            RUN / "logs/decontaminate_count/{shard}.log",
        resources:
            **needs("decontaminate_count", 4000, minutes=240),
        params:
            settings=keys("decontaminate_count"),
            files=EVALUATION_FILES,
        shell:
            'python -m corpus.decontaminate count --config "$URLS_TO_GPT2_SETTINGS" --input {input.documents:q} '
            "--output {output.counts:q} --workers {threads} > {log:q} 2>&1"

    # With the counts of all shards as input of each shard, N shards would read N^2 files.
    rule decontaminate_sum:
        input:
            expand(result("decontaminate_count"), shard=SHARDS),
        output:
            counts=RUN / "decontaminate/counts.json",
        log:
            RUN / "logs/decontaminate_sum.log",
        resources:
            **needs("decontaminate_sum", 4000, minutes=60),
        params:
            shards=len(SHARDS),
        shell:
            "python -m corpus.decontaminate sum --counts {RUN:q}/decontaminate --shards {params.shards} "
            "--output {output.counts:q} > {log:q} 2>&1"

    rule decontaminate:
        input:
            documents=WITHOUT_REPEATS,
            counts=RUN / "decontaminate/counts.json",
        output:
            documents=result("decontaminate"),
        log:
            RUN / "logs/decontaminate/{shard}.log",
        resources:
            **needs("decontaminate", 4000, minutes=240),
        params:
            settings=keys("decontaminate"),
            files=EVALUATION_FILES,
            rejects=rejects("decontaminate"),
            stats=stats("decontaminate"),
        shell:
            'python -m corpus.decontaminate cut --config "$URLS_TO_GPT2_SETTINGS" --input {input.documents:q} '
            "--counts {input.counts:q} --output {output.documents:q} --rejects {params.rejects:q} "
            "--stats {params.stats:q} --workers {threads} --allow-empty > {log:q} 2>&1"


if settings.train_tokenizer.vocab_size:

    rule train_tokenizer:
        input:
            expand(DOCUMENTS, shard=SHARDS),
        output:
            encoder=settings.tokenize.encoder_json,
            merges=settings.tokenize.vocab_bpe,
            stats=result("train_tokenizer"),
        log:
            RUN / "logs/train_tokenizer.log",
        threads: 4
        resources:
            **needs("train_tokenizer", 8000, minutes=24 * 60),
        params:
            settings=keys("train_tokenizer"),
        shell:
            'python -m corpus.train_tokenizer --config "$URLS_TO_GPT2_SETTINGS" --input {input:q} '
            "--output-dir {RUN:q}/tokenizer --stats {output.stats:q} --workers {threads} > {log:q} 2>&1"


VOCABULARY = [settings.tokenize.encoder_json, settings.tokenize.vocab_bpe]
VOCABULARY = list(filter(None, VOCABULARY))


rule tokenize:
    input:
        documents=DOCUMENTS,
        vocabulary=made_here(VOCABULARY),
    output:
        idx=result("tokenize"),
    log:
        RUN / "logs/tokenize/{shard}.log",
    resources:
        **needs("tokenize", 2000, minutes=120),
    params:
        settings=keys("tokenize"),
        vocabulary=hashes(VOCABULARY),
        prefix=f"{RUN}/tokens/{{shard}}",
        rejects=rejects("tokenize"),
        stats=stats("tokenize"),
    shell:
        'python -m corpus.tokenize --config "$URLS_TO_GPT2_SETTINGS" --input {input.documents:q} '
        "--output-prefix {params.prefix:q} --rejects {params.rejects:q} --stats {params.stats:q} "
        "--workers {threads} --allow-empty > {log:q} 2>&1"


rule merge_index:
    input:
        expand(result("tokenize"), shard=SHARDS),
    output:
        bin=f"{settings.dataset_prefix}.bin",
        idx=f"{settings.dataset_prefix}.idx",
        meta=f"{settings.dataset_prefix}.json",
        stats=result("merge_index"),
    log:
        RUN / "logs/merge_index.log",
    resources:
        **needs("merge_index", 2000, minutes=240),
    params:
        shards=len(SHARDS),
    shell:
        "python -m corpus.merge_index --inputs {RUN:q}/tokens --shards {params.shards} "
        "--output-prefix {settings.dataset_prefix:q} --stats {output.stats:q} > {log:q} 2>&1"


rule corpus:
    input:
        expand(DOCUMENTS, shard=SHARDS),


rule dataset:
    input:
        rules.merge_index.output,
