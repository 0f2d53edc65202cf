"""Makes `cluster/corpus_jobs/executor.py` known to Snakemake, which finds plugins by the name of this package."""

from cluster.corpus_jobs.executor import Executor, ExecutorSettings, common_settings

__all__ = ["Executor", "ExecutorSettings", "common_settings"]
