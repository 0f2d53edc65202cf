"""A profile of some iterations on one rank: CPU and GPU activity, and memory.

    with Profile(folder, train, world) as profile:
        profile.begin(iteration)    # before each iteration

MODEL_FOLDER/profile/iter_0000010-0000012/
    rank_00000.json     Chrome trace, for https://ui.perfetto.dev
    rank_00000.txt      operations, by the time and by the memory that they took
    rank_00000.pickle   GPUs: each allocation with its stack, for https://pytorch.org/memory_viz
"""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from common.console import say, warn
from common.files import cache_path, write_text
from common.settings import TrainSettings
from training.launch.process_group import World

_ROWS = 40  # operations in a table
_ALLOCATIONS = 1_000_000  # that a snapshot goes back


class Profile:
    """Records the iterations of `train.profile` on the ranks of `train.profile_ranks`."""

    def __init__(self, folder: Path, train: TrainSettings, world: World) -> None:
        first, last = train.profile or (1, 0)
        self._wanted = range(first, last + 1) if world.rank in train.profile_ranks else range(0)
        self._folder, self._rank, self._on_gpu = folder / "profile", world.rank, world.device.type == "cuda"
        self._profiler: profile | None = None
        self._first = self._last = 0

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *_error: object) -> None:
        self._end()

    def begin(self, iteration: int) -> None:
        """Start the recording at the first iteration to record, and end it after the last."""
        if iteration not in self._wanted:
            return self._end()
        if self._profiler is None:
            self._first = iteration
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
            self._profiler = profile(activities=activities, record_shapes=True, profile_memory=True)
            if self._on_gpu:
                torch.cuda.memory._record_memory_history(max_entries=_ALLOCATIONS, stacks="python")
            self._profiler.start()
        self._last = iteration

    def _end(self) -> None:
        """Write the files, if something is recorded; a full disk ends no training."""
        if self._profiler is None:
            return
        recorded, self._profiler = self._profiler, None
        recorded.stop()
        name = self._folder / f"iter_{self._first:07d}-{self._last:07d}" / f"rank_{self._rank:05d}"
        times, held = ("self_device_time_total", "self_device_memory_usage")
        if not self._on_gpu:
            times, held = ("self_cpu_time_total", "self_cpu_memory_usage")
        try:
            with cache_path(name.with_suffix(".json")) as path:
                recorded.export_chrome_trace(str(path))
            tables = [recorded.key_averages().table(sort_by=key, row_limit=_ROWS) for key in (times, held)]
            write_text(name.with_suffix(".txt"), "\n".join(tables))
            if self._on_gpu:
                with cache_path(name.with_suffix(".pickle")) as path:
                    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
            say(f"profile of iterations {self._first} to {self._last}: {name}.json")
        except (OSError, RuntimeError) as error:
            warn(f"{name}: no profile: {error}")
        finally:
            if self._on_gpu:
                torch.cuda.memory._record_memory_history(enabled=None)
