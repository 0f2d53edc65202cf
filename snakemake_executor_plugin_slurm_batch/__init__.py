"""Snakemake finds `cluster/corpus_jobs/executor.py` by the name of this package."""

import sys
from pathlib import Path
from typing import Any

from snakemake.settings import types
from snakemake_interface_common.exceptions import WorkflowError

from cluster.corpus_jobs.executor import Executor, ExecutorSettings, common_settings
from common.config import read_yaml
from common.console import fail
from common.errors import ToolkitError
from common.user import name_user

__all__ = ["Executor", "ExecutorSettings", "common_settings"]

_load = types.load_configfile


def _load_configfile(path: Path) -> Any:
    """End with a line that names file and line for a configuration that cannot be read."""
    try:
        return _load(path)
    except (WorkflowError, OSError, ValueError):
        try:
            read_yaml(path)
        except (ToolkitError, OSError) as error:
            sys.exit(fail(error))
        raise


# Snakemake imports its plugins before it asks for the user's home or reads a configuration
name_user()
types.load_configfile = _load_configfile
