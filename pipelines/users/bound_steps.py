"""The steps of a job that bounds users, each a list of independent tasks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pipelines.users.bound_job import BoundJob
from pipelines.users.user_records import gather, write_users

#: Names of the steps; users are gathered only if they are sampled.
TEXT, READ, CHOOSE, GATHER, WRITE = STEPS = (
    "read text",
    "read ids",
    "choose",
    "gather",
    "write",
)


class Step(NamedTuple):
    """A list of tasks, which may run in any order.

    Attributes:
      name: One of ``STEPS`` except TEXT, which comes before there is a job.
      task: Picklable function of one item.
      items: Runs or parts.
    """

    name: str
    task: Callable[[Any], None]
    items: Sequence[Any]


def steps(job: BoundJob) -> list[Step]:
    """Returns the steps of a job, in order."""
    runs, parts = job.runs, range(job.num_parts)
    first = [Step(READ, job.list_ids, runs), Step(CHOOSE, job.choose, parts)]
    if not job.has_users:
        return [*first, Step(WRITE, job.write, runs)]
    return [
        *first,
        Step(GATHER, functools.partial(gather, job), runs),
        Step(WRITE, functools.partial(write_users, job), parts),
    ]
