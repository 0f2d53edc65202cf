"""The configuration section `cluster`: where jobs run, and their Slurm options."""

from typing import Annotated, Literal

from pydantic import Field

from common.settings.section import Name, NonNegativeInt, PositiveFloat, PositiveInt, Section

_Rate = Annotated[float, Field(ge=0)]


class GpuSettings(Section):
    """A kind of GPU and its node's links. Peaks are dense, without the sparsity of data sheets."""

    memory_gib: PositiveFloat
    """Memory that PyTorch reports (total_memory), in GiB; a bit less than in the product's name."""
    bfloat16_tflops: _Rate = 0
    """Peak of bfloat16 matrix products in TFLOP/s. 0: none, and precision auto is float32."""
    float16_tflops: _Rate = 0
    """Peak of float16 matrix products in TFLOP/s. 0: as bfloat16."""
    tf32_tflops: _Rate = 0
    """Peak of TF32 matrix products in TFLOP/s. 0: no TF32."""
    float32_tflops: PositiveFloat
    """Peak of float32 matrix products in TFLOP/s."""
    memory_gb_per_s: PositiveFloat
    """Bandwidth of its memory, in GB/s."""
    node_gb_per_s: PositiveFloat
    """What one GPU sends to the others of its node, in GB/s: half of NVLink's figure, or PCIe's."""
    network_gb_per_s: PositiveFloat
    """Each GPU's share of what its node sends to other nodes, in GB/s."""
    gpus_per_node: PositiveInt = 8
    """GPUs of a usual node."""
    device_names: list[str] = []
    """Regular expressions for the driver's name of the device; the first matching kind counts."""
    source: str = ""
    """Where the figures are from."""


class SiteSettings(Section):
    """A Slurm site's options for a job. Empty values leave the site's default or SBATCH_*."""

    partition: Name = ""
    """Slurm partition."""
    account: Name = ""
    """Slurm account."""
    qos: Name = ""
    """Quality of service."""
    constraint: Name = ""
    """Features that a node must have."""
    reservation: Name = ""
    """Reservation."""
    exclusive: bool = False
    """Whole nodes."""
    sbatch: list[str] = []
    """Further options of sbatch, such as --mail-type=END."""
    setup: list[str] = []
    """Shell commands that a job runs first, such as module load cuda."""


class CorpusJobSettings(SiteSettings):
    """Corpus jobs on Slurm. Partition, account, QOS, reservation default to those of `cluster`."""

    shards_per_job: NonNegativeInt = 0
    """Shards per Slurm job, one after the other. 0: as many as keep an array within max_tasks."""
    max_tasks: PositiveInt = 100
    """Maximum number of tasks of one job array."""
    runtime_minutes: dict[str, PositiveInt] = {}
    """Wall-clock minutes of a Slurm job by rule, such as {scrape: 480}; unfinished shards go on."""
    partitions: dict[str, Name] = {}
    """Partition by rule, such as {scrape: internet}; only scrape and fetch need the internet."""


class JobSettings(SiteSettings):
    """A model's overrides of `cluster` for its Slurm jobs. Empty or 0: the value of `cluster`."""

    gpus_per_node: NonNegativeInt = 0
    """GPUs per node, one process each; 0 trains on CPUs."""
    gpu: Name = ""
    """Kind of the GPUs, such as h100 or one of `gpus`: submissions are then checked against its
    memory. The kinds: `python -m training.plan --list-gpus`. Empty: not checked before the job
    starts."""
    gres: Name = ""
    """How the site spells GPUs, such as gpu:a100; the number is added. Empty: gpu."""
    cpus_per_task: NonNegativeInt = 0
    """CPU cores per process, and its threads, regardless of OMP_NUM_THREADS: equal numbers give
    equal digits on a laptop and on Slurm. 0: an equal share of this machine's cores; in a Slurm job
    a GPU's share of its node's, or 1 without GPUs."""
    mem_gb_per_task: NonNegativeInt = 0
    """Memory per process, in GB (Slurm only). 0: the site's default."""
    min_nodes: NonNegativeInt = 0
    """Fewest nodes on which a job may start (Slurm only). Each start takes the most free nodes, up
    to those of `parallel`, over which the global batch divides. 0: always all of them."""
    shrink_after_minutes: NonNegativeInt = 0
    """With min_nodes: how long a job in the queue waits for all its nodes before it accepts fewer.
    Needs a process that waits for the job (`--wait`, Snakemake)."""


class ClusterSettings(JobSettings):
    """Where training jobs run (`python -m cluster.submit`), and their Slurm options."""

    executor: Literal["local", "slurm"] = "local"
    """local: processes on this machine; slurm: a Slurm job, through sbatch."""
    gpus: dict[str, GpuSettings] = {}
    """Further kinds of GPUs by name, for planning."""
    tasks_per_node: PositiveInt = 8
    """Processes per node if it has no GPUs."""
    container: Name = ""
    """Command that runs Python in a container, such as apptainer exec --nv image.sif."""
    signal_seconds: Annotated[int, Field(ge=1, le=65535)] = 90
    """Seconds before the time limit at which a job saves and is requeued."""
    max_restarts: NonNegativeInt = 3
    """Consecutive restarts without a new checkpoint after which a job fails."""
    interface: Name = ""
    """Network interface, such as ib0; empty: that of the node's name, or loopback on one node."""
    corpus: CorpusJobSettings = CorpusJobSettings()
    """Corpus jobs."""

    def site_of(self, gpus: int, partition: str = "") -> SiteSettings:
        """The options of a job of the DAG: as training jobs if it has GPUs, else as corpus jobs.

        `partition`: that of its rule, if the configuration names one.
        """
        own: dict[str, object] = {"partition": partition} if partition else {}
        if not gpus:
            inherited = ("partition", "account", "qos", "reservation", "setup")
            missing = {key: getattr(self, key) for key in inherited if not getattr(self.corpus, key)}
            return self.corpus.model_copy(update=missing | own)
        options = [*self.sbatch, f"--gres={self.gres or 'gpu'}:{gpus}"]
        return self.model_copy(update={"sbatch": options, "exclusive": False, **own})
