# The phases of deduplication: one job per shard for signatures and filter, one per 8 shards for bands and for verify, one
# for clusters. Signatures and all.removed, which clusters writes, stay: a later run compares its documents with those
# that this one has kept (`dedup.against`).

from corpus.dedup.signatures import content_of as content_of_earlier
from corpus.dedup.signatures import earlier_signatures


localrules:
    dedup_signed,


WORK = RUN / "dedup/work"
# One file per part of a column, and as many blocks of pairs.
PARTS = [
    str(part) for part in range((1 + settings.dedup.bands) * settings.dedup.ranges)
]
EARLIER = snakefile.or_exit(content_of_earlier)(settings.dedup.against)
# The jobs that share the parts. A job of bands or verify takes .6 s of CPU to start. Both together work .4 s on a shard of
# 10,000 documents of 620 characters (docs/dedup.md, Cost) and 3.3 s on one of 3,000 characters (docs/benchmarks.md). So
# per 2 x .6 = 1.2 s of start, 8 shards are 3 to 27 s of work. The number is in no file name, input or param, so that
# changing it repeats no work.
SHARDS_PER_JOB = 8
SHARDS_READ = len(SHARDS) + len(earlier_signatures(settings.dedup.against))
JOBS = min(settings.dedup.jobs, len(PARTS), -(-SHARDS_READ // SHARDS_PER_JOB))


def parts(wildcards, output):
    """What a job of a loop works on: its command line is read when it runs, and cannot name the loop's variable.

    Snakemake does not record a param that depends on `output`.
    """
    return [f"{Path(path).stem}/{len(PARTS)}" for path in output]


# 1,000 MB for Python and its libraries, plus the data that grows with the corpus
MEMORY_MB = 1000 + int(1000 * settings.dedup.memory_gb)


rule dedup_signatures:
    input:
        result("clean"),
    output:
        signatures=result("dedup_signatures"),
    log:
        RUN / "logs/dedup_signatures/{shard}.log",
    resources:
        **needs("dedup_signatures", 2000, minutes=240),
    params:
        settings=keys("dedup_signatures"),
    shell:
        'python -m corpus.dedup signatures --config "$URLS_TO_GPT2_SETTINGS" --input {input:q} '
        "--work {WORK:q} --workers {threads} > {log:q} 2>&1"


# One file that stands for all signatures, so that they are not inputs of every job of the next rule.
rule dedup_signed:
    input:
        expand(rules.dedup_signatures.output.signatures, shard=SHARDS),
    output:
        temp(touch(WORK / "signed")),


for job in range(JOBS):

    rule:
        name:
            f"dedup_bands_{job}"
        input:
            rules.dedup_signed.output,
        output:
            pairs=temp(expand(WORK / "{part}.pairs", part=PARTS[job::JOBS])),
        log:
            RUN / f"logs/dedup_bands/{job}.log",
        resources:
            **needs("dedup_bands", MEMORY_MB, minutes=240),
        params:
            parts_of_columns=len(PARTS),
            earlier=EARLIER,
            shards=len(SHARDS),
            parts=parts,
        shell:
            'python -m corpus.dedup bands --config "$URLS_TO_GPT2_SETTINGS" --work {WORK:q} '
            "--shards {params.shards} --part {params.parts} > {log:q} 2>&1"

    # It also reads the signatures and the shards, which exist before the pairs.
    rule:
        name:
            f"dedup_verify_{job}"
        input:
            pairs=expand(WORK / "{part}.pairs", part=PARTS),
        output:
            edges=temp(expand(WORK / "{part}.edges", part=PARTS[job::JOBS])),
        log:
            RUN / f"logs/dedup_verify/{job}.log",
        resources:
            **needs("dedup_verify", MEMORY_MB, minutes=12 * 60),
        params:
            settings=keys("dedup_clusters"),
            shards=len(SHARDS),
            parts=parts,
        shell:
            'python -m corpus.dedup verify --config "$URLS_TO_GPT2_SETTINGS" --work {WORK:q} '
            "--shards {params.shards} --part {params.parts} > {log:q} 2>&1"


rule dedup_clusters:
    input:
        signatures=expand(rules.dedup_signatures.output.signatures, shard=SHARDS),
        pairs=expand(WORK / "{part}.pairs", part=PARTS),
        edges=expand(WORK / "{part}.edges", part=PARTS),
    output:
        clusters=temp(WORK / "all.clusters"),
        stats=result("dedup_clusters"),
    log:
        RUN / "logs/dedup_clusters.log",
    resources:
        **needs("dedup_clusters", MEMORY_MB, minutes=12 * 60),
    params:
        settings=keys("dedup_clusters"),
        earlier=EARLIER,
        shards=len(SHARDS),
    shell:
        'python -m corpus.dedup clusters --config "$URLS_TO_GPT2_SETTINGS" --work {WORK:q} '
        "--shards {params.shards} --stats {output.stats:q} > {log:q} 2>&1"


rule dedup:
    input:
        documents=result("clean"),
        clusters=rules.dedup_clusters.output.clusters,
    output:
        documents=result("dedup"),
    log:
        RUN / "logs/dedup/{shard}.log",
    resources:
        **needs("dedup", 2000, minutes=240),
    params:
        stats=stats("dedup"),
    shell:
        "python -m corpus.dedup filter --input {input.documents:q} --work {WORK:q} "
        "--output-dir {RUN:q}/dedup --stats {params.stats:q} > {log:q} 2>&1"
