"""Threads: as many as are needed, no more than allowed, none kept for nothing."""

from __future__ import annotations

from threading import Event, Lock

from exec_server.local.files.pool import Pool
from support.wait import eventually


def test_one_thread_does_one_job_after_the_other() -> None:
    pool, done = Pool(), []
    for number in range(20):
        finished = Event()
        pool.run(lambda n, event: (done.append(n), event.set()), number, finished)
        assert finished.wait(10)
    assert done == list(range(20))
    assert pool.threads <= 2  # the next job may come before the thread has gone back to wait


def test_grows_when_all_are_stuck() -> None:
    pool, release, seen = Pool(), Event(), Event()
    for _ in range(10):
        pool.run(release.wait)
    pool.run(seen.set)
    assert seen.wait(10)
    assert pool.threads == 11
    release.set()


def test_stops_growing_at_its_bound_and_forgets_no_job() -> None:
    pool, release, lock, done = Pool(most=3), Event(), Lock(), []

    def job(number: int) -> None:
        release.wait()
        with lock:
            done.append(number)

    for number in range(20):
        pool.run(job, number)
    assert pool.threads == 3
    release.set()
    eventually(lambda: len(done) == 20)
    assert sorted(done) == list(range(20))
    assert pool.threads == 3


def test_threads_without_work_end_and_new_ones_come() -> None:
    pool = Pool(idle_seconds=0.01)
    for _ in range(3):
        ran = Event()
        pool.run(ran.set)
        assert ran.wait(10)
        eventually(lambda: pool.threads == 0)
