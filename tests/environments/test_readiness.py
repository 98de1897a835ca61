"""The table of a handle's readiness."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.environments.readiness import ATTEMPTING, FINISHED, TRANSITIONS, Happening, Readiness, step


@given(st.lists(st.sampled_from(Happening), max_size=40))
def test_only_what_is_in_the_table_happens(happenings: list[Happening]) -> None:
    state = Readiness.NOT_STARTED
    attempts = successes = 0
    for happening in happenings:
        if happening not in TRANSITIONS[state]:
            with pytest.raises(RuntimeError, match=f"{state.value} cannot be {happening.value}"):
                step(state, happening)
            continue
        before, state = state, step(state, happening)
        attempts += happening is Happening.START
        successes += happening is Happening.SUCCEED
        # Ready is reached by an attempt that is under way, and by nothing else.
        assert (state is Readiness.READY) == (happening is Happening.SUCCEED)
        assert state is not Readiness.READY or before in ATTEMPTING
        assert successes <= attempts
        # What is finished never looks unfinished again.
        assert before not in FINISHED or state in FINISHED
    if state in ATTEMPTING:
        assert Happening.START not in TRANSITIONS[state], "one attempt at a time"


def test_every_state_can_be_reached_and_closed() -> None:
    reached = {target for changes in TRANSITIONS.values() for target in changes.values()}
    assert reached == set(Readiness) - {Readiness.NOT_STARTED}
    for state in set(Readiness) - {Readiness.CLOSED}:
        assert TRANSITIONS[state][Happening.CLOSE] is Readiness.CLOSED
    assert not TRANSITIONS[Readiness.CLOSED]


def test_failed_for_good_is_for_good() -> None:
    assert set(TRANSITIONS[Readiness.FAILED].values()) == {Readiness.CLOSED}


def test_a_retry_that_fails_is_forgotten() -> None:
    for failure in (Happening.FAIL_FOR_NOW, Happening.FAIL_FOR_GOOD):
        after = step(Readiness.RETRYING, failure)
        assert step(after, Happening.START) is Readiness.RETRYING
