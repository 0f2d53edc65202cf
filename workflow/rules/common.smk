# The validated configuration, and the paths that more than one file of rules needs.

import sys
from pathlib import Path

from common.config import settings_for_workflow

settings = settings_for_workflow(config, workflow.configfiles)
RUN = settings.run
CONFIG = (
    RUN / "config.yaml"
)  # the resolved configuration: what the steps read, beside their results
SHARDS = [f"{shard:04d}" for shard in range(settings.shards)]


# The steps run with the Python that runs Snakemake, activated environment or not.
shell.prefix(f"set -euo pipefail; export PATH={Path(sys.executable).parent}:$PATH; ")


wildcard_constraints:
    shard=r"\d+",
    job=r"\d+",
    model=r"\w+",
