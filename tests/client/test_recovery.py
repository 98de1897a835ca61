"""The table and the schedule of recovery, without any connection."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.client.errors import ConnectionLost, ProtocolError, ServerRejected, SessionLost
from exec_server.client.recovery import (
    RENDEZVOUS,
    TRANSITIONS,
    WEBSOCKET,
    Attempts,
    Backoff,
    Happening,
    State,
    budget,
    failure_text,
    is_worth_another_try,
    sleep_text,
    step,
)
from exec_server.transport.websocket import ConnectFailed

LOST = ConnectionLost("gone")


@given(st.lists(st.sampled_from(Happening), max_size=30))
def test_only_what_is_in_the_table_happens(happenings: list[Happening]) -> None:
    state = State.CONNECTING
    for happening in happenings:
        if happening in TRANSITIONS[state]:
            state = step(state, happening)
        else:
            with pytest.raises(RuntimeError, match=f"{state.value} cannot be {happening.value}"):
                step(state, happening)
    # What has failed never comes back, and what is closed stays closed.
    assert not TRANSITIONS[State.CLOSED]
    assert set(TRANSITIONS[State.FAILED].values()) == {State.CLOSED}


def test_every_state_can_be_left_and_reached() -> None:
    reached = {target for changes in TRANSITIONS.values() for target in changes.values()}
    assert reached == set(State) - {State.CONNECTING}
    for state in set(State) - {State.CLOSED}:
        assert TRANSITIONS[state][Happening.CLOSED] is State.CLOSED


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (ConnectionLost("x"), True),
        (SessionLost("x"), True),
        (ConnectFailed("HTTP 503", 503), True),
        (ConnectFailed("HTTP 401", 401), True),
        (ConnectionRefusedError(), True),
        (TimeoutError("initialize"), True),
        (ServerRejected("initialize", -32010, "already attached"), True),
        (ServerRejected("initialize", -32600, "unknown session id x"), False),
        (ProtocolError("nonsense"), False),
        (ValueError("a bug"), False),
    ],
)
def test_which_errors_are_worth_another_try(error: Exception, again: bool) -> None:
    assert is_worth_another_try(error) is again


def test_a_transport_may_say_itself_whether_to_try_again() -> None:
    class Offline(Exception):
        retryable = True

    class Forbidden(OSError):
        retryable = False

    assert is_worth_another_try(Offline())
    assert not is_worth_another_try(Forbidden())


def test_a_websocket_is_tried_every_tenth_of_a_second() -> None:
    assert [WEBSOCKET.delay(attempt, "s") for attempt in (1, 2, 50)] == [0.1, 0.1, 0.1]


def test_a_rendezvous_is_given_more_and_more_time() -> None:
    plain = Backoff(RENDEZVOUS.first, RENDEZVOUS.factor, RENDEZVOUS.most, 0.0)
    assert [plain.delay(attempt, "s") for attempt in range(1, 8)] == [0.5, 1, 2, 4, 5, 5, 5]
    assert plain.delay(10**6, "s") == 5


@given(st.integers(1, 10_000), st.text(max_size=40))
def test_jitter_is_bounded_and_always_the_same(attempt: int, session: str) -> None:
    plain = Backoff(RENDEZVOUS.first, RENDEZVOUS.factor, RENDEZVOUS.most, 0.0).delay(attempt, session)
    delay = RENDEZVOUS.delay(attempt, session)
    assert plain <= delay <= plain * 1.5
    assert delay == RENDEZVOUS.delay(attempt, session)


def test_attempts_end_with_the_time() -> None:
    attempts = Attempts(100.0, 0.0, 25.0)
    assert attempts.failed(100.0, 0.0, LOST) == 0.1
    assert attempts.failed(124.95, 0.0, LOST) == pytest.approx(0.05)
    verdict = "recovery timed out after 25s (last attempt: gone)"
    assert attempts.failed(125.0, 0.0, TimeoutError()) == verdict
    assert Attempts(0.0, 0.0, 0.0).failed(0.0, 0.0, TimeoutError()) == "recovery timed out after 0s"


def test_a_connection_that_breaks_at_once_is_not_made_again_at_once() -> None:
    attempts = Attempts(100.0, 0.0, 25.0)
    assert attempts.first_delay(100.0, 99.5) == 0.1
    assert attempts.first_delay(100.0, 98.0) == 0.0


def test_a_permanent_error_ends_it_at_once() -> None:
    attempts = Attempts(0.0, 0.0, 25.0)
    error = ServerRejected("initialize", -32600, "unknown session id s")
    assert attempts.failed(0.0, 0.0, error) == "exec-server rejected request (-32600): unknown session id s"
    assert attempts.made == 1


def test_time_asleep_does_not_count() -> None:
    """The clock stands still in a sleep; the network that has to come back after it gets its time, too."""
    attempts = Attempts(0.0, 50.0, 25.0)
    assert attempts.failed(24.0, 50.0, LOST) == 0.1
    assert attempts.failed(24.5, 50.0 + 3600, LOST) == 0.1
    assert attempts.left(24.5) == 25.0
    assert attempts.failed(49.4, 50.0 + 3600, LOST) == pytest.approx(0.1)
    assert isinstance(attempts.failed(49.5, 50.0 + 3600, LOST), str)


@given(
    budget=st.floats(0.1, 100),
    steps=st.lists(st.tuples(st.floats(0, 5), st.sampled_from((0.0, 0.0, 10.0))), max_size=60),
)
def test_no_delay_passes_the_deadline(budget: float, steps: list[tuple[float, float]]) -> None:
    now, asleep = 0.0, 0.0
    attempts = Attempts(now, asleep, budget, RENDEZVOUS, "session")
    awake_since = 0.0
    for passed, slept in steps:
        now += passed
        asleep += slept
        if slept:
            awake_since = now
        verdict = attempts.failed(now, asleep, LOST)
        if isinstance(verdict, str):
            assert now - awake_since >= budget - 1e-6
            return
        assert now - awake_since < budget + 1e-6
        assert 0 <= verdict <= budget - (now - awake_since) + 1e-6


def test_a_sleep_is_told_apart_from_a_blip() -> None:
    unknown = "exec-server rejected request (-32600): unknown session id s"
    blip = failure_text("reset", unknown, 0.001, 30.0)
    assert blip == (
        "exec-server transport disconnected: reset; failed to resume exec-server session: " + unknown
    )
    slept = failure_text("reset", unknown, 7500.0, None)
    assert slept.startswith(blip)
    assert "this machine slept for 2h05min, longer than the 30s for which the server keeps" in slept
    assert "slept for 40s, less than the 60min" in sleep_text(40.0, 3600.0)
    assert sleep_text(1.0, 30.0) == ""


def test_how_long_to_try() -> None:
    assert budget(None, None) == 25
    assert budget(None, 5.0) == 25, "the server says no, soon enough"
    assert budget(None, 600.0) == 595
    assert budget(3.0, 600.0) == 3
    assert budget(0.0, None) == 0


def test_a_session_that_was_had_again_is_tried_for_as_long_again() -> None:
    attempts = Attempts(0.0, 0.0, 25.0)
    attempts.renew(40.0)
    assert isinstance(attempts.failed(60.0, 0.0, ConnectionLost("x")), float)
    assert isinstance(attempts.failed(66.0, 0.0, ConnectionLost("x")), str)


def test_an_absence_that_was_too_long_is_named() -> None:
    text = failure_text("cut", "unknown session id x", 0.0, 30.0, 41.0)
    assert text.endswith("(away for 41s; the server keeps a session without a connection for 30s)")
    assert failure_text("cut", "unknown session id x", 0.0, 30.0, 12.0).endswith("unknown session id x")


def test_a_silence_that_was_too_long_is_named() -> None:
    text = failure_text("cut", "unknown session id x", 0.0, 30.0, 1.0, 41.0)
    assert text.endswith(
        "(nothing was heard of the server for 41s; it keeps a session without a connection for 30s)"
    )
    assert "away for 35s" in failure_text("cut", "unknown session id x", 0.0, 30.0, 35.0, 41.0)
    assert failure_text("cut", "unknown session id x", 0.0, 30.0, 1.0, 29.0).endswith("unknown session id x")
