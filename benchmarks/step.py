"""An optimiser step: ours against transformers and a plain loop in the manner of nanoGPT; then ours on 2 processes.

A step is forward, backward, clipping and fused AdamW, without dropout, on the same samples. Ours is the trainer's own,
its reading of data among it; the peers get `transformers`' GPT2LMHeadModel (SDPA attention), or the shortest GPT-2 that
can be written. All have the vocabulary that our layout pads 50,257 to, 50,304. Rows take turns, each in processes of
its own (4 GB each at 124M), and a ratio is the median over the rounds, so that what else runs hits all rows alike.
On CPUs everything is float32, on all cores; two processes share them, with one process' micro-batches for both. There
ours lets glibc keep memory that is freed, as the trainer always does; the peers run as their users run them.
With a GPU it is 345M in bfloat16: ours compiles each layer, the peer the whole model, as they come.

FLOP a token are 6 (N - wpe) + 12 L h s, attention counted whole (Narayanan et al. 2021, appendix, without its
recomputation): 2.425 G at 345M. Of the peak means: of float32 products of large matrices, a row of its own, or of the
989 TFLOP/s that an H100 and an H200 have for dense bfloat16.
"""

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from benchmarks.machine import table
from common.cli import positive_int
from common.errors import JobError
from common.settings import Experiment, ModelSettings, ParallelSettings, Settings, TrainSettings
from common.workers import available_cpus
from corpus.index import IndexWriter, Meta

if TYPE_CHECKING:
    from torch import Tensor, nn

    from training.dataset.batches import Batch

_RATE = 1e-4  # learning rate
_WARMUP = 1  # steps: allocations and, on a GPU, compilation
_MATRIX = 2048  # rows and columns of the product that stands for the machine
_GPU_PEAK = 989e12  # FLOP/s


class Size(NamedTuple):
    """A model and how much of it a step is."""

    model: ModelSettings
    micro_batch_size: int
    steps: int
    """Steps a round: a few seconds of work."""

    @property
    def rows(self) -> int:
        """Of the embedding, in all rows of the table."""
        from training.parallel.vocabulary import padded_vocab_size

        return padded_vocab_size(self.model.vocab_size, 1)

    @property
    def flop_per_token(self) -> int:
        """Of a forward and a backward pass, padding rows among them: all rows of the table compute those."""
        from training.metrics.flops import flops_per_token

        return flops_per_token(self.model.model_copy(update={"vocab_size": self.rows}))


SIZES = {
    "small": Size(ModelSettings(n_layer=6, n_embd=384, n_head=6, seq_len=256, dropout=0), 4, 2),
    "124m": Size(ModelSettings(n_layer=12, n_embd=768, n_head=12, seq_len=1024, dropout=0), 1, 1),
    "345m": Size(ModelSettings(n_layer=24, n_embd=1024, n_head=16, seq_len=1024, dropout=0), 16, 20),
}


class Job(NamedTuple):
    """What the processes of a row do."""

    folder: Path
    """Of the dataset, and to meet in."""
    size: Size
    parallel: ParallelSettings = ParallelSettings()
    """The layout of ours."""
    micro_batches: int = 1
    """In a step, of all data-parallel ranks together."""

    @property
    def settings(self) -> Settings:
        """The configuration of ours."""
        train = TrainSettings(
            iterations=1,
            micro_batch_size=self.size.micro_batch_size,
            global_batch_size=self.size.micro_batch_size * self.micro_batches,
            split="1,0,0",
        )
        run = Experiment(model=self.size.model, parallel=self.parallel, train=train)
        return Settings(run=self.folder, urls=["-"], models={"step": run})


LAYOUTS = {
    "tensor 2": ParallelSettings(tensor=2),
    "tensor 2, sequence parallel": ParallelSettings(tensor=2, sequence_parallel=True),
    "data 2, ZeRO 0": ParallelSettings(data=2),
}

Steps = Iterator["Tensor | float"]
"""Each `next` is one optimiser step, and gives its loss, which may still be on the device."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--size", choices=SIZES, action="append", help="default: 345m with a GPU, else small and 124m")
    parser.add_argument("--steps", type=positive_int, metavar="N", help="of a round (default 2 at small, 1 at 124m)")
    parser.add_argument("--rounds", type=positive_int, default=5, metavar="N", help="turns of each row (default 5)")


def write_dataset(job: Job) -> None:
    """Random tokens, some of them as frequent as those of text are, so that there is something to learn."""
    random, model, prefix = np.random.RandomState(1), job.size.model, job.settings.dataset_prefix
    prefix.parent.mkdir(parents=True)
    with IndexWriter(prefix, np.uint16, Meta(model.vocab_size, model.vocab_size - 1)) as writer:
        for _ in range(64):
            writer.add_document((random.zipf(1.2, 4 * model.seq_len) % model.vocab_size).astype(np.uint16))


# ------------------------------------------------------------------------------------------------ ours


def ours(job: Job) -> Steps:
    """The trainer's own step."""
    from training.parallel.launch import read_launch
    from training.parallel.process_group import started
    from training.plan import make_plan
    from training.step import step_batches, train_step
    from training.trainer import open_session

    with started(read_launch(), job.folder) as world:
        plan = make_plan(job.settings, "step")
        session = open_session(plan.experiment, world)
        for iteration, batches in enumerate(step_batches(session, plan.data.train, 0), 1):
            yield train_step(session, iteration, batches, _RATE).loss
            session.timers.collect()


# ------------------------------------------------------------------------------------------------ peers


def transformers(job: Job) -> Steps:
    """Hugging Face's model; its loss leaves out the last token of a sample."""
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = job.size.model
    options: dict[str, Any] = {
        **settings.model_dump(include={"n_layer", "n_embd", "n_head"}),
        "n_positions": settings.seq_len,
        "vocab_size": job.size.rows,
        **dict.fromkeys(("bos_token_id", "eos_token_id"), settings.vocab_size - 1),
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        "use_cache": False,
        "attn_implementation": "sdpa",
    }
    model: Any = GPT2LMHeadModel(GPT2Config(**options)).train()
    model.loss_type = "ForCausalLM"  # it takes this one anyway, with a warning
    return _plain_loop(job, model, lambda batch: model(input_ids=batch.tokens, labels=batch.tokens).loss)


def nanogpt(job: Job) -> Steps:
    """The plain model, compiled on a GPU."""
    import torch

    model = plain_gpt2(job.size)
    forward: Any = torch.compile(model) if torch.cuda.is_available() else model
    return _plain_loop(job, model, lambda batch: forward(batch.tokens, batch.targets)[1])


def plain_gpt2(size: Size) -> "nn.Module":
    """GPT-2 as one writes it for one device: tokens and targets in, logits and mean loss out."""
    import torch
    from torch import Tensor, nn
    from torch.nn import functional as F

    width, n_head = size.model.n_embd, size.model.n_head

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Tensor) -> Tensor:
            batch, tokens, _ = x.shape
            parts = self.qkv(self.ln_1(x)).split(width, dim=2)
            q, k, v = (part.view(batch, tokens, n_head, width // n_head).transpose(1, 2) for part in parts)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).contiguous().view(batch, tokens, width))
            y = self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))
            out: Tensor = x + y
            return out

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.wpe = nn.Embedding(size.rows, width), nn.Embedding(size.model.seq_len, width)
            self.h = nn.Sequential(*(Block() for _ in range(size.model.n_layer)))
            self.ln_f = nn.LayerNorm(width)
            self.head = nn.Linear(width, size.rows, bias=False)
            self.head.weight = self.wte.weight

        def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
            logits = self.head(self.ln_f(self.h(self.wte(tokens) + self.wpe(positions))))
            return logits, F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))

    model = Model()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, 0.0, 0.02)
    return model


def _plain_loop(job: Job, model: "nn.Module", mean_loss: Callable[["Batch"], "Tensor"]) -> Steps:
    """Train with PyTorch's parts alone."""
    import torch

    from training.dataset.batches import BatchForm, read_batch
    from training.plan import make_plan

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(available_cpus())
    data, micro = make_plan(job.settings, "step").data.train, job.size.micro_batch_size
    form = BatchForm(data.end_of_text)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, fused=True)
    first = 0
    while True:
        batch = read_batch(data, form, range(first, first + micro)).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = mean_loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()
        first += micro


def matrices(_job: Job) -> Steps:
    """No step at all: a product of large matrices, which no step can outdo."""
    import torch

    torch.set_num_threads(available_cpus())
    left, right = torch.rand(_MATRIX, _MATRIX), torch.rand(_MATRIX, _MATRIX)
    product = torch.empty(_MATRIX, _MATRIX)
    while True:
        yield torch.mm(left, right, out=product)[0, 0]


# ------------------------------------------------------------------------------------------------ measuring


def _serve(steps: Callable[[Job], Steps], job: Job, rank: int, processes: int, pipe: Connection) -> None:
    """In a process of its own: run as many steps as the pipe asks for, and answer with their seconds."""
    os.environ |= {
        "SUBMITIT_EXECUTOR": "local",
        "SUBMITIT_LOCAL_JOB_ID": "step",
        "SUBMITIT_LOCAL_NTASKS": str(processes),
        "SUBMITIT_LOCAL_GLOBALID": str(rank),
        "SUBMITIT_LOCAL_LOCALID": str(rank),
    }
    running = steps(job)
    while number := pipe.recv():
        started = time.perf_counter()
        *_, loss = islice(running, number)
        float(loss)  # waits for the device
        pipe.send(time.perf_counter() - started)


@contextmanager
def processes(steps: Callable[[Job], Steps], job: Job) -> Iterator[Callable[[int], float]]:
    """Start the processes of a row, which wait; yields what runs so many steps and returns the seconds of the slowest.

    Raises JobError when one of them ends by itself.
    """
    spawn = multiprocessing.get_context("spawn")
    size = job.settings.models["step"].world_size
    pipes, tasks = [], []
    try:
        for rank in range(size):
            mine, theirs = spawn.Pipe()
            tasks.append(spawn.Process(target=_serve, args=(steps, job, rank, size, theirs)))
            tasks[-1].start()
            theirs.close()  # so that a process that ends is noticed
            pipes.append(mine)

        def run(number: int) -> float:
            try:
                for pipe in pipes:
                    pipe.send(number)
                return max(float(pipe.recv()) for pipe in pipes)
            except (EOFError, OSError):
                raise JobError(
                    f"{steps.__name__}: a process of the benchmark ended; what it printed says why"
                ) from None

        yield run
    finally:
        for task in tasks:
            task.kill()
            task.join()


def seconds(rows: Mapping[str, tuple[Callable[[Job], Steps], Job]], steps: int, rounds: int) -> dict[str, list[float]]:
    """Seconds a step of every row, a value for each round. Rows take turns; the others wait meanwhile."""
    with ExitStack() as stack:
        runs = {label: stack.enter_context(processes(*row)) for label, row in rows.items()}
        for run in runs.values():
            run(_WARMUP)
        times: dict[str, list[float]] = {label: [] for label in runs}
        for _ in range(rounds):
            for label, run in runs.items():
                times[label].append(run(steps) / steps)
    return times


def ratio(times: list[float], to: list[float]) -> float:
    """How many times as fast as the row `to`: the median of rounds side by side."""
    return median(other / own for own, other in zip(times, to, strict=True))


def beside_peers(name: str, job: Job, steps: int, rounds: int, gpu: bool) -> list[dict[str, str]]:
    """Rows of ours and its peers, one process each."""
    peers = {"nanoGPT-style, compiled": nanogpt} if gpu else {"transformers": transformers, "nanoGPT-style": nanogpt}
    machine = {} if gpu else {"matrices": matrices}
    times = seconds({label: (row, job) for label, row in {**peers, "ours": ours, **machine}.items()}, steps, rounds)
    fastest = min(peers, key=lambda label: median(times[label]))
    tokens = job.size.micro_batch_size * job.size.model.seq_len
    work = job.size.flop_per_token * tokens
    rows = []
    for label in (*peers, "ours"):
        peaks = [_GPU_PEAK if gpu else 2 * _MATRIX**3 / each for each in times.get("matrices", times[label])]
        share = median(work / own / peak for own, peak in zip(times[label], peaks, strict=True))
        rows.append(
            {
                "size": name,
                "step": label,
                "tokens": f"{tokens:,}",
                "tokens/s": f"{tokens / median(times[label]):,.0f}",
                "of the faster peer": f"{ratio(times[label], times[fastest]):.3f}",
                "GFLOP/token": f"{job.size.flop_per_token / 1e9:.3f}",
                "of the peak": f"{share:.1%}",
            }
        )
    return rows


def on_two_processes(name: str, job: Job, steps: int, rounds: int) -> list[dict[str, str]]:
    """Rows of layouts, each beside a single process: all of them at once would not fit a laptop's memory."""
    rows = []
    for label, parallel in LAYOUTS.items():
        pair = {"alone": (ours, job), "layout": (ours, job._replace(parallel=parallel))}
        times = seconds(pair, steps, rounds)
        tokens = job.micro_batches * job.size.micro_batch_size * job.size.model.seq_len
        alone, layout = (tokens / median(times[key]) for key in pair)
        rows.append(
            {
                "size": name,
                "2 processes": label,
                "tokens": f"{tokens:,}",
                "tokens/s": f"{layout:,.0f}",
                "one process, tokens/s": f"{alone:,.0f}",
                "ratio": f"{ratio(times['layout'], times['alone']):.3f}",
            }
        )
    return rows


def measure(arguments: argparse.Namespace) -> str:
    """Rows of tokens a second, for each size."""
    import torch

    gpu = torch.cuda.is_available()
    beside, spread = [], []
    for name in arguments.size or (["345m"] if gpu else ["small", "124m"]):
        size = SIZES[name]
        steps = arguments.steps or size.steps
        with TemporaryDirectory() as folder:
            job = Job(Path(folder), size)
            write_dataset(job)
            beside += beside_peers(name, job, steps, arguments.rounds, gpu)
            if not gpu:
                spread += on_two_processes(name, job._replace(micro_batches=2), steps, arguments.rounds)
    return "\n\n".join(table(rows) for rows in (beside, spread) if rows)
