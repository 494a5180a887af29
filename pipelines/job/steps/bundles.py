"""What the DoFns share: threads, and the check of delivered elements.

Formal guarantees:
  - A bundle ends after all of its work, or with an error; an abandoned bundle writes
    nothing more.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterable, Sequence

import apache_beam as beam

from accounting.core.validation import InputError


def check_delivery(found: Iterable[int], expected: Sequence[int]) -> None:
    """Checks that each of the expected elements was delivered once.

    Args:
      found: Numbers of the delivered elements.
      expected: Numbers of the sent elements, ascending.

    Raises:
      InputError: the engine lost or repeated elements.
    """
    delivered = sorted(found)
    if delivered != list(expected):
        raise InputError(
            f"Expected the engine to deliver each of {len(expected)} elements once; "
            f"it delivered {len(delivered)}. Run the job again, on a runner that loses "
            "and repeats nothing."
        )


class BundleFn(beam.DoFn):
    """Runs the jobs of a bundle on threads; the bundle ends after all of its jobs.

    The output of a job is known before it runs.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads

    def start_bundle(self) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(self._num_threads)
        self._jobs: list[concurrent.futures.Future[None]] = []

    def _run(self, job: Callable[..., None], *arguments: object) -> None:
        if self._num_threads == 1:
            job(*arguments)  # at once, so that the engine sees progress
        else:
            self._jobs.append(self._pool.submit(job, *arguments))

    def finish_bundle(self) -> None:
        try:
            for job in concurrent.futures.as_completed(self._jobs):
                job.result()
        finally:
            self._pool.shutdown(cancel_futures=True)

    def teardown(self) -> None:
        # An abandoned bundle is not finished, and must write nothing more.
        if hasattr(self, "_pool"):
            self._pool.shutdown(cancel_futures=True)
