"""Makes `cluster/corpus_jobs/executor.py` known to Snakemake, which finds plugins by the name of this package."""

from cluster.corpus_jobs.executor import Executor, ExecutorSettings, common_settings
from workflow.snakefile import name_yaml_errors

name_yaml_errors()  # Snakemake imports its plugins before it reads a configuration
__all__ = ["Executor", "ExecutorSettings", "common_settings"]
