import itertools
import threading
import time

import pytest

from moe_jax.train import feed
from moe_jax.train.feed import DataError, Feed


def forever(batches, release):
    """The batches, and then one that does not come before ``release`` is set."""
    yield from batches
    release.wait()
    yield "late"


def failing(error):
    yield "first"
    raise error


@pytest.fixture
def make_feed():
    """(batches, timeout_seconds) -> (Feed, what it said)."""
    feeds = []

    def make(batches, timeout_seconds=0.0):
        said = []
        feeds.append(
            Feed(iter(batches), source="corpus", timeout_seconds=timeout_seconds, say=said.append)
        )
        return feeds[-1], said

    yield make
    for made in feeds:
        made.close()


def take(made, *, stopped=lambda: False, busy=lambda: False):
    return made.next(stopped=stopped, busy=busy, step=7)


def test_batches_come_in_order(make_feed):
    made, said = make_feed(itertools.count())
    assert [take(made) for _ in range(50)] == list(range(50)) and said == []


def test_a_hanging_reader_is_told_of_and_ends_the_wait(make_feed, monkeypatch):
    monkeypatch.setattr(feed, "_SAY_EVERY_SECONDS", 0.1)
    made, said = make_feed(forever(["first"], threading.Event()), timeout_seconds=0.35)
    assert take(made) == "first"
    with pytest.raises(DataError) as caught:
        take(made)
    assert str(caught.value) == "step 7: no batch of corpus in 0.35 s (data.timeout_seconds)"
    assert 2 <= len(said) <= 3 and said[0] == "waiting for data since 0 s"


def test_a_wait_can_be_stopped_and_gone_on_with(make_feed):
    release = threading.Event()
    made, _ = make_feed(forever([], release))
    assert take(made, stopped=lambda: True) is None
    release.set()
    assert take(made) == "late"


def test_only_a_wait_of_an_idle_device_counts(make_feed):
    def slow():
        while True:
            time.sleep(0.2)
            yield "batch"

    made, _ = make_feed(slow())
    take(made, busy=lambda: True)
    assert made.idle_seconds == 0
    take(made)
    assert 0.1 < made.idle_seconds
    before = made.idle_seconds
    done = time.perf_counter() + 0.1  # the device, half-way
    take(made, busy=lambda: time.perf_counter() < done)
    assert 0.05 < made.idle_seconds - before < 0.19


@pytest.mark.parametrize("error", [OSError(5, "Input/output error", "a/b"), ValueError("a\nb")])
def test_what_cannot_be_read_is_one_line(make_feed, error):
    made, _ = make_feed(failing(error))
    take(made)
    with pytest.raises(DataError, match="^step 7: corpus cannot be read: .*(a/b|a b)") as caught:
        take(made)
    assert "\n" not in str(caught.value)


def test_a_mistake_in_the_reader_keeps_its_traceback(make_feed):
    made, _ = make_feed(failing(KeyError("tokens")))
    take(made)
    with pytest.raises(KeyError):
        take(made)
