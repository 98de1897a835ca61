"""The ends and the router together, in virtual time, whatever happens to their cables."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from .world import World


@given(st.integers(0, 2**64))
@settings(max_examples=100)
def test_every_message_once_and_in_order_or_an_end_that_both_see(seed: int) -> None:
    assert World(seed).run() is None


def test_a_router_that_restarts_again_and_again_loses_nothing() -> None:
    world = World(1)
    world.loss = 0.0
    for number in range(5):
        world.loop.call_later(6.0 + 8.0 * number, world.restart_router)
    world.sent = [b"[%d]" % number for number in range(400)]  # forty seconds of them
    assert world.run() is None
    assert world.client.messages == world.sent
