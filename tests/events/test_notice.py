"""Telling a retry from the end."""

from __future__ import annotations

import pytest

from exec_server.events.notice import Notice, parse_notice, readable


@pytest.mark.parametrize(
    ("message", "notice"),
    [
        ("Reconnecting... 1/5", Notice(1, 5, None)),
        ("Reconnecting... 2/5 (stream closed)", Notice(2, 5, "stream closed")),
        ("Reconnecting... 10/100 (a) b) (c)\nd)", Notice(10, 100, "a) b) (c)\nd")),
        ("Reconnecting... 1/5 ()", Notice(1, 5, "")),
        ("Reconnecting... waiting for network", Notice(None, None, None)),
        ("Reconnecting... waiting for network (no route)", Notice(None, None, "no route")),
        ("reconnecting... 1/5", None),
        (" Reconnecting... 1/5", None),
        ("Reconnecting... 1/5 and so on", None),
        ("Reconnecting... 1/5 (open", None),
        ("Reconnecting... /5", None),
        ("Reconnecting... \u0661/\u0665", None),
        ("Reconnecting...", None),
        ("we said Reconnecting... 1/5", None),
        ("Reconnecting... " + "9" * 5000 + "/5", None),
        ("", None),
    ],
)
def test_what_is_a_notice(message: str, notice: Notice | None) -> None:
    assert parse_notice(message) == notice
    if notice is not None:
        assert notice.text == message


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ('{"error":{"message":"bad model","type":"x"}}', "bad model"),
        ('{"error":"bad"}', '{"error":"bad"}'),
        ('{"error":{"message":""}}', '{"error":{"message":""}}'),
        ("{not json", "{not json"),
        ("{" * 100_000, "{" * 100_000),
        ("plain", "plain"),
    ],
)
def test_the_sentence_in_a_message(message: str, shown: str) -> None:
    assert readable(message) == shown
