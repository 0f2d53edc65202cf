# The phases of deduplication: signatures and filter a job a shard, bands and verify `dedup.jobs` jobs, clusters one.

WORK = RUN / "dedup/work"
JOBS = [str(job) for job in range(settings.dedup.jobs)]
MEMORY_MB = 1000 + int(
    1000 * settings.dedup.memory_gb
)  # beside what grows with the corpus: Python and its libraries


rule dedup_signatures:
    input:
        RUN / "clean/{shard}.jsonl.zst",
    output:
        signatures=temp(WORK / "{shard}.signatures"),
    log:
        RUN / "logs/dedup_signatures/{shard}.log",
    benchmark:
        RUN / "benchmarks/dedup_signatures/{shard}.tsv"
    resources:
        mem_mb=2000,
        runtime=240,
    params:
        settings=settings.dedup.model_dump(
            mode="json", exclude={"jobs", "memory_gb", "threshold"}
        ),
        config=CONFIG,
    shell:
        "python -m corpus.dedup signatures --config {params.config} --input {input} --output {output.signatures} "
        "--workers {threads} > {log} 2>&1"


rule dedup_bands:
    input:
        signatures=expand(rules.dedup_signatures.output.signatures, shard=SHARDS),
    output:
        pairs=temp(WORK / "{job}.pairs"),
    log:
        RUN / "logs/dedup_bands/{job}.log",
    benchmark:
        RUN / "benchmarks/dedup_bands/{job}.tsv"
    resources:
        mem_mb=MEMORY_MB,
        runtime=240,
    params:
        config=CONFIG,
        folder=WORK,
        shards=len(SHARDS),
        jobs=len(JOBS),
    shell:
        "python -m corpus.dedup bands --config {params.config} --signatures {params.folder} --shards {params.shards} "
        "--output {output.pairs} --part {wildcards.job}/{params.jobs} > {log} 2>&1"


# It reads the signatures, too: they came before the pairs, and stay for dedup_clusters.
rule dedup_verify:
    input:
        pairs=expand(rules.dedup_bands.output.pairs, job=JOBS),
    output:
        edges=temp(WORK / "{job}.edges"),
    log:
        RUN / "logs/dedup_verify/{job}.log",
    benchmark:
        RUN / "benchmarks/dedup_verify/{job}.tsv"
    resources:
        mem_mb=MEMORY_MB,
        runtime=12 * 60,
    params:
        threshold=settings.dedup.threshold,
        config=CONFIG,
        folder=WORK,
        shards=len(SHARDS),
        jobs=len(JOBS),
    shell:
        "python -m corpus.dedup verify --config {params.config} --signatures {params.folder} --shards {params.shards} "
        "--pairs {params.folder} --output {output.edges} --block {wildcards.job}/{params.jobs} > {log} 2>&1"


rule dedup_clusters:
    input:
        signatures=expand(rules.dedup_signatures.output.signatures, shard=SHARDS),
        pairs=expand(rules.dedup_bands.output.pairs, job=JOBS),
        edges=expand(rules.dedup_verify.output.edges, job=JOBS),
    output:
        clusters=temp(WORK / "all.clusters"),
        stats=RUN / "dedup/clusters.json",
    log:
        RUN / "logs/dedup_clusters.log",
    benchmark:
        RUN / "benchmarks/dedup_clusters.tsv"
    resources:
        mem_mb=MEMORY_MB,
        runtime=12 * 60,
    params:
        config=CONFIG,
        folder=WORK,
        shards=len(SHARDS),
    shell:
        "python -m corpus.dedup clusters --config {params.config} --signatures {params.folder} "
        "--shards {params.shards} --pairs {params.folder} --edges {params.folder} --output {output.clusters} --stats {output.stats} > {log} 2>&1"


rule dedup:
    input:
        documents=RUN / "clean/{shard}.jsonl.zst",
        clusters=rules.dedup_clusters.output.clusters,
    output:
        documents=RUN / "dedup/{shard}.jsonl.zst",
        removed=RUN / "dedup/removed/{shard}.jsonl.zst",
        stats=RUN / "dedup/{shard}.stats.json",
    log:
        RUN / "logs/dedup/{shard}.log",
    benchmark:
        RUN / "benchmarks/dedup/{shard}.tsv"
    resources:
        mem_mb=2000,
        runtime=240,
    params:
        folder=RUN / "dedup",
    shell:
        "python -m corpus.dedup filter --input {input.documents} --clusters {input.clusters} "
        "--output-dir {params.folder} --stats {output.stats} > {log} 2>&1"
