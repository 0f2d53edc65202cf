"""An optimiser step: ours against transformers and a plain loop like nanoGPT's.

A step is forward, backward, clipping and fused AdamW, without dropout, on the same samples. Ours is
the trainer's own step with reading its data; the peers are `transformers`' GPT2LMHeadModel (SDPA
attention) and a minimal GPT-2. All have the padded vocabulary of our layout, 50,304. On CPUs
everything is float32, on all cores. Ours lets glibc keep freed memory, as the trainer always does;
the peers run as their users run them. `benchmarks.gpu` has the steps on a GPU.
"""

from argparse import Namespace
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.harness import Row, Timed, compare
from common.settings import Experiment, ModelSettings, Settings, TrainSettings
from common.workers import available_cpus

if TYPE_CHECKING:
    from torch import Tensor, nn

    from training.dataset.batches import Batch
    from training.planning.run import Plan
    from training.session import Session

Steps = Generator["Tensor | float", None, None]
"""Each `next` runs one optimiser step and returns its loss, maybe still on the device."""


class Size(NamedTuple):
    """A model, and how much of it is measured."""

    model: ModelSettings
    micro_batch_size: int
    steps: int
    """Steps per round: a few seconds of work."""

    @property
    def rows(self) -> int:
        """Rows of the embedding: the padded vocabulary."""
        from training.parallel.sizes import padded_vocab_size

        return padded_vocab_size(self.model.vocab_size, 1)


SIZES = {
    "tiny": Size(ModelSettings(n_layer=2, n_head=2, n_embd=32, seq_len=16, vocab_size=256, dropout=0), 2, 1),
    "124m": Size(ModelSettings(n_layer=12, n_embd=768, n_head=12, seq_len=1024, dropout=0), 1, 1),
    "345m": Size(ModelSettings(n_layer=24, n_embd=1024, n_head=16, seq_len=1024, dropout=0), 16, 20),
    "1.5b": Size(ModelSettings(n_layer=48, n_embd=1600, n_head=25, seq_len=1024, dropout=0), 8, 1),
}


class Job(NamedTuple):
    """The work of one row."""

    folder: Path
    """Folder of the dataset."""
    size: Size
    train: Mapping[str, Any] = {}  # never changed
    """More keys of the `train` section of our trainer."""

    @property
    def settings(self) -> Settings:
        """The configuration of our trainer."""
        micro = self.size.micro_batch_size
        keys = {"iterations": 1, "split": "1,0,0", "micro_batch_size": micro, "global_batch_size": micro, **self.train}
        experiment = Experiment(model=self.size.model, train=TrainSettings.model_validate(keys))
        return Settings(run=self.folder, urls=["-"], models={"step": experiment})


def write_dataset(job: Job) -> None:
    """Write random tokens with the frequencies of words, in documents of 600 tokens on average."""
    import numpy as np

    from corpus.index import IndexWriter, Meta

    random, model, prefix = np.random.RandomState(1), job.size.model, job.settings.dataset_prefix
    prefix.parent.mkdir(parents=True)
    with IndexWriter(prefix, np.uint16, Meta(model.vocab_size, model.vocab_size - 1)) as writer:
        for length in random.geometric(1 / 600, size=256 * model.seq_len // 600):
            tokens = random.zipf(1.2, length) % (model.vocab_size - 1)
            writer.add_document(np.append(tokens, model.vocab_size - 1).astype(np.uint16))


@contextmanager
def opened(job: Job) -> "Iterator[tuple[Plan, Session]]":
    """Our trainer's model and optimiser, opened as for a training."""
    from training.launch.process_group import started
    from training.launch.rank import read_launch
    from training.operations import choose_operations
    from training.planning.run import make_plan
    from training.session import open_session

    with started(read_launch(), job.folder) as world:
        plan = make_plan(job.settings, "step")
        seconds = None if job.train.get("kernels") == "auto" else 0.0  # unknown: they are measured
        choose_operations(plan.experiment, world, job.folder, seconds)
        yield plan, open_session(plan.experiment, world)


def ours(job: Job) -> Steps:
    """The step of our trainer."""
    from training.step import step_batches, train_step

    with opened(job) as (plan, session):
        for iteration, batches in enumerate(step_batches(session, plan.data.train, 0), 1):
            yield train_step(session, iteration, batches, 1e-4).loss
            session.timers.collect()


def transformers(job: Job) -> Steps:
    """Hugging Face's model; its loss ignores the last token of a sample."""

    def make() -> "nn.Module":
        model = hugging_face(job.size.model, job.size.rows).train()
        model.loss_type = "ForCausalLM"  # its default anyway, but without a warning
        return model  # type: ignore[no-any-return]

    return _plain_loop(job, make, lambda model, batch: model(input_ids=batch.tokens, labels=batch.tokens).loss)


def hugging_face(settings: ModelSettings, rows: int) -> Any:
    """transformers' GPT-2 with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    options: dict[str, Any] = {
        **settings.model_dump(include={"n_layer", "n_embd", "n_head"}),
        "n_positions": settings.seq_len,
        "vocab_size": rows,
        **dict.fromkeys(("bos_token_id", "eos_token_id"), settings.vocab_size - 1),
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), settings.dropout),
        "attn_implementation": "sdpa",
    }
    return GPT2LMHeadModel(GPT2Config(**options))


def nanogpt(job: Job) -> Steps:
    """The plain model below."""
    return _plain_loop(job, partial(plain_gpt2, job.size), lambda model, batch: model(batch.tokens, batch.targets)[1])


def plain_gpt2(size: Size) -> "nn.Module":
    """A minimal GPT-2 for one device: takes tokens and targets, returns logits and mean loss."""
    import torch
    from torch import Tensor, nn
    from torch.nn import functional as F

    width, n_head, dropout = size.model.n_embd, size.model.n_head, size.model.dropout

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
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
            x = x + F.dropout(self.out(y.transpose(1, 2).contiguous().view(batch, tokens, width)), dropout)
            y = self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))
            out: Tensor = x + F.dropout(y, dropout)
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
            x = F.dropout(self.wte(tokens) + self.wpe(positions), dropout)
            logits = self.head(self.ln_f(self.h(x)))
            return logits, F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))

    model = Model()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, 0.0, 0.02)
    return model


def _plain_loop(job: Job, make: Callable[[], "nn.Module"], mean_loss: Callable[[Any, "Batch"], "Tensor"]) -> Steps:
    """Train with plain PyTorch; on a GPU the model is compiled."""
    import torch

    from training.dataset.batches import BatchForm, read_batch
    from training.planning.run import make_plan

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(available_cpus())
    data, micro = make_plan(job.settings, "step").data.train, job.size.micro_batch_size
    form = BatchForm(data.end_of_text, pinned=device.type == "cuda")  # copied during the previous step
    with device:
        model = make()
    called = torch.compile(model) if device.type == "cuda" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    first = 0
    while True:
        batch = read_batch(data, form, range(first, first + micro)).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = mean_loss(called, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()
        first += micro


CONTENDERS: Mapping[str, Callable[[Job], Steps]] = {
    "nanoGPT-style": nanogpt,
    "transformers": transformers,
    "ours": ours,
}


DOCUMENTS_APART = {"reset_attention_mask": True, "reset_position_ids": True, "eod_mask_loss": True}


def stepping(steps: Callable[[Job], Steps], job: Job) -> Timed:
    """The steps of a round, after one to warm up."""
    running = steps(job)
    next(running)
    return lambda: [float(loss) for loss in islice(running, job.size.steps)]


def measure(arguments: Namespace) -> Iterator[Row]:
    """An optimiser step against transformers and a plain loop: tokens per second."""
    job = Job(arguments.work, size := SIZES[arguments.size])
    write_dataset(job)
    contenders = {name: partial(stepping, steps, job) for name, steps in CONTENDERS.items()}
    contenders["ours, documents apart"] = partial(stepping, ours, job._replace(train=DOCUMENTS_APART))
    tokens = size.steps * size.micro_batch_size * size.model.seq_len
    yield from compare("step", contenders, arguments.rounds, tokens, "tokens")
