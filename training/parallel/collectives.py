"""Collective operations on Python objects; in a single process they need no process group."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

Result = TypeVar("Result")


def all_gather(value: Any, group: Any = None) -> list[Any]:
    """The `value` of every rank, in rank order (a collective call over `group`, by default all)."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def run_on_all_ranks(action: Callable[[], Result], group: Any = None) -> Result:
    """Run `action` on every rank; an error on one rank is raised on all (a collective call)."""
    problem: Exception | None = None
    result: Result | None = None
    try:
        result = action()
    except Exception as raised:
        problem = raised
    for error in all_gather(problem, group):
        if error is not None:
            raise error
    return cast(Result, result)


def run_on_rank0(action: Callable[[], Result], rank: int) -> Result:
    """The result of `action`, run on rank 0, or its error, on every rank (a collective call)."""
    on_this_rank: Callable[[], Result | None] = action if rank == 0 else lambda: None
    return cast(Result, all_gather(run_on_all_ranks(on_this_rank))[0])
