"""What is configured, from every source: the scenarios C1 to C11 and C20 of the specification."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.environments.config import (
    LOCAL_ID,
    URL_VARIABLE,
    CommandTransport,
    Configuration,
    ConfigurationError,
    RelayTransport,
    WebsocketTransport,
    find_home,
    load,
    parse,
)

PREFIX = "exec-server protocol error: "


def entry(**members: object) -> str:
    """An [[environments]] table; values that are already TOML are given as they are."""
    return "[[environments]]\n" + "".join(f"{name} = {value}\n" for name, value in members.items())


BOX = entry(id='"box"', url='"ws://127.0.0.1:1"')


# Where from --------------------------------------------------------------------------------------


def test_c1_nothing_configured_is_this_machine(tmp_path: Path) -> None:
    assert load(str(tmp_path), {}) == Configuration()
    assert Configuration().default == LOCAL_ID
    assert Configuration().ids() == [LOCAL_ID]
    assert not Configuration().default_is_remote


@pytest.mark.parametrize("value", ["none", "  NONE ", "NoNe"])
def test_c2_none_switches_everything_off(tmp_path: Path, value: str) -> None:
    found = load(str(tmp_path), {URL_VARIABLE: value})
    assert (found.environments, found.default, found.include_local) == ((), None, False)
    assert found.ids() == []
    assert not found.default_is_remote


@pytest.mark.parametrize("value", ["", "   ", "\t\n"])
def test_a_blank_variable_says_nothing(tmp_path: Path, value: str) -> None:
    assert load(str(tmp_path), {URL_VARIABLE: value}) == Configuration()


def test_c3_a_url_is_the_only_environment(tmp_path: Path) -> None:
    found = load(str(tmp_path), {URL_VARIABLE: " ws://127.0.0.1:8765 "})
    assert found.ids() == ["remote"]
    assert found.default == "remote"
    assert found.default_is_remote
    assert not found.include_local
    transport = found.environments[0].transport
    assert transport == WebsocketTransport(url="ws://127.0.0.1:8765")
    assert isinstance(transport, WebsocketTransport)
    assert (transport.connect_timeout, transport.initialize_timeout) == (10, 10)


def test_a_url_is_not_looked_at_before_it_is_used(tmp_path: Path) -> None:
    assert load(str(tmp_path), {URL_VARIABLE: "nonsense"}).default == "remote"


def test_c4_the_file_wins_over_the_variable(tmp_path: Path) -> None:
    (tmp_path / "environments.toml").write_text(BOX)
    found = load(str(tmp_path), {URL_VARIABLE: "ws://127.0.0.1:2"})
    assert found.ids() == ["local", "box"]
    assert found.source == str(tmp_path / "environments.toml")


def test_c20_exec_server_url_comes_last(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('model = "x"\n[exec_server]\nurl = " ws://127.0.0.1:3 "\n')
    found = load(str(tmp_path), {})
    assert found.environments[0].transport == WebsocketTransport(url="ws://127.0.0.1:3")
    assert (found.default, found.include_local) == ("remote", False)
    assert str(tmp_path) in found.source
    by_variable = load(str(tmp_path), {URL_VARIABLE: "ws://127.0.0.1:2"})
    assert by_variable.environments[0].transport == WebsocketTransport(url="ws://127.0.0.1:2")
    assert load(str(tmp_path), {URL_VARIABLE: " "}) == found
    (tmp_path / "environments.toml").write_text("")
    assert load(str(tmp_path), {}).default == LOCAL_ID


def test_exec_server_url_has_the_rules_of_the_variable(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text('[exec_server]\nurl = "None"\n')
    assert load(str(tmp_path), {}).ids() == []
    config.write_text('[exec_server]\nurl = ""\n')
    assert load(str(tmp_path), {}) == Configuration()
    config.write_text("model = 1\n")
    assert load(str(tmp_path), {}) == Configuration()
    for text, wrong in (
        ("[exec_server]\nurll = 'x'\n", "unknown key `urll` in [exec_server]; did you mean `url`?"),
        ("[exec_server]\nurl = 5\n", "`exec_server.url` must be text in quotes, not a whole number"),
        ("exec_server = 5\n", "`exec_server` must be a table, not a whole number"),
    ):
        config.write_text(text)
        with pytest.raises(ConfigurationError) as caught:
            load(str(tmp_path), {})
        assert caught.value.reason == f"failed to parse config `{config}`: {wrong}"


def test_the_relay_variables_come_first_and_together(tmp_path: Path) -> None:
    (tmp_path / "environments.toml").write_text(BOX)
    variables = {
        "CODEX_EXEC_SERVER_NOISE_REGISTRY_URL": "http://127.0.0.1:1",
        "CODEX_EXEC_SERVER_NOISE_ENVIRONMENT_ID": "far",
        "CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN": "secret-token",
    }
    found = load(str(tmp_path), variables)
    assert found.environments[0].transport == RelayTransport(
        registry_url="http://127.0.0.1:1", environment_id="far", auth_token="secret-token"
    )
    assert found.default == "remote"
    assert "secret-token" not in repr(found)
    for name in variables:
        some = {**variables, name: " "}
        with pytest.raises(ConfigurationError) as caught:
            load(str(tmp_path), some)
        assert str(caught.value) == (
            "environment registry configuration error: Noise environment requires"
            " CODEX_EXEC_SERVER_NOISE_REGISTRY_URL, CODEX_EXEC_SERVER_NOISE_ENVIRONMENT_ID,"
            " and CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN"
        )
    assert load(str(tmp_path), dict.fromkeys(variables, " ")).ids() == ["local", "box"]


def test_the_home_directory(tmp_path: Path) -> None:
    assert find_home({"CODEX_HOME": str(tmp_path), "HOME": "/h"}) == os.path.realpath(tmp_path)
    assert find_home({"HOME": "/h"}) == "/h/.codex"
    with pytest.raises(ConfigurationError, match="does not exist"):
        find_home({"CODEX_HOME": str(tmp_path / "missing")})
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="is not a directory"):
        find_home({"CODEX_HOME": str(tmp_path / "file")})


# The file ----------------------------------------------------------------------------------------


def test_a_mark_of_the_byte_order_says_nothing(tmp_path: Path) -> None:
    """Editors of another operating system put one there, and the reference reads it."""
    (tmp_path / "environments.toml").write_bytes(b'\xef\xbb\xbfdefault = "none"\n')
    assert load(str(tmp_path), {}).default is None
    (tmp_path / "environments.toml").unlink()
    (tmp_path / "config.toml").write_bytes(b'\xef\xbb\xbf[exec_server]\nurl = "none"\n')
    assert not load(str(tmp_path), {}).include_local


def test_c5_an_empty_file_is_this_machine() -> None:
    found = parse("")
    assert (found.environments, found.default, found.include_local) == ((), LOCAL_ID, True)


def test_c6_without_this_machine_and_without_a_default() -> None:
    found = parse("include_local = false\n" + BOX)
    assert (found.default, found.ids()) == (None, ["box"])


@pytest.mark.parametrize("word", ["none", "None", " NONE "])
def test_c7_a_default_of_none_leaves_this_machine_there(word: str) -> None:
    found = parse(f'default = "{word}"\n')
    assert (found.default, found.include_local) == (None, True)


def test_c8_the_order_is_kept() -> None:
    found = parse('default = " second "\n' + BOX + entry(id='"second"', program='"x"'))
    assert found.ids() == ["local", "box", "second"]
    assert found.default == "second"
    assert found.default_is_remote
    assert found.find("second") is found.environments[1]
    assert found.find("local") is None


def test_c9_a_relative_directory_is_relative_to_the_file() -> None:
    text = entry(id='"a"', program='"ssh"', cwd='"work/space"')
    transport = parse(text, "/etc/x/environments.toml").environments[0].transport
    assert isinstance(transport, CommandTransport)
    assert transport.cwd == "/etc/x/work/space"
    absolute = parse(entry(id='"a"', program='"ssh"', cwd='"/w"'), "/etc/x/environments.toml")
    assert absolute.environments[0].transport == CommandTransport(program="ssh", cwd="/w")
    with pytest.raises(ConfigurationError, match="environment `a` cwd must be absolute"):
        parse(text)


def test_c10_the_length_of_an_id() -> None:
    assert parse(entry(id=f'"{"x" * 64}"', program='"p"')).ids()[1] == "x" * 64
    with pytest.raises(ConfigurationError, match="cannot be longer than 64 characters"):
        parse(entry(id=f'"{"x" * 65}"', program='"p"'))


def test_everything_an_entry_can_say() -> None:
    found = parse(
        """
        default = "devbox"
        include_local = true

        [[environments]]
        id = "devbox"
        url = " wss://example.test:8765/x "
        connect_timeout_sec = 12.5
        initialize_timeout_sec = 0
        auth_bearer_token = "t0ken"
        [environments.skills]
        required = ["a"]

        [[environments]]
        id = "ssh-dev"
        program = " ssh "
        args = ["dev", "exec-server --listen stdio"]
        cwd = "workspace"
        initialize_timeout_sec = 30
        [environments.env]
        LOG = "debug"
        """,
        "/home/me/.codex/environments.toml",
    )
    assert found.environments[0].transport == WebsocketTransport(
        url="wss://example.test:8765/x", connect_timeout=12.5, initialize_timeout=0, bearer_token="t0ken"
    )
    assert found.environments[1].transport == CommandTransport(
        program="ssh",
        args=("dev", "exec-server --listen stdio"),
        env={"LOG": "debug"},
        cwd="/home/me/.codex/workspace",
        initialize_timeout=30,
    )
    assert "t0ken" not in repr(found)


WRONG = [
    (entry(id='""', program='"p"'), "environment id cannot be empty"),
    (entry(id='"  "', program='"p"'), "environment id cannot be empty"),
    (entry(id='" a"', program='"p"'), "environment id ` a` must not contain surrounding whitespace"),
    (entry(id='"local"', program='"p"'), "environment id `local` is reserved"),
    (entry(id='"nOne"', program='"p"'), "environment id `nOne` is reserved"),
    (
        entry(id=f'"{"é" * 33}"', program='"p"'),
        f"environment id `{'é' * 33}` cannot be longer than 64 characters",
    ),
    (
        entry(id='"a.b"', program='"p"'),
        "environment id `a.b` must contain only ASCII letters, numbers, '-' or '_'",
    ),
    (
        entry(id='"a"', url='"ws://h"', args="[]"),
        "environment `a` args, env, and cwd require program",
    ),
    (
        entry(id='"a"', url='"ws://h"', env="{}"),
        "environment `a` args, env, and cwd require program",
    ),
    (
        entry(id='"a"', url='"ws://h"', cwd='"/"'),
        "environment `a` args, env, and cwd require program",
    ),
    (
        entry(id='"a"', program='"p"', connect_timeout_sec=1),
        "environment `a` connect_timeout_sec requires url",
    ),
    (
        entry(id='"a"', program='"p"', auth_bearer_token='"t"'),
        "environment `a` auth_bearer_token requires url",
    ),
    (
        entry(id='"a"', url='"ws://127.0.0.1"', auth_bearer_token='"t\\u0001"'),
        "invalid value for exec-server WebSocket header `authorization`",
    ),
    (
        entry(id='"a"', url='"ws://example.test"', auth_bearer_token='"t"'),
        "exec-server WebSocket headers require wss:// or a loopback destination",
    ),
    (entry(id='"a"'), "environment `a` must set exactly one of url or program"),
    (
        entry(id='"a"', url='"ws://h"', program='"p"'),
        "environment `a` must set exactly one of url or program",
    ),
    (entry(id='"a"', url='" "'), "environment url cannot be empty"),
    (entry(id='"a"', url='"http://h"'), "environment url `http://h` must use ws:// or wss://"),
    (entry(id='"a"', url='"WS://h"'), "environment url `WS://h` must use ws:// or wss://"),
    (
        entry(id='"a"', url='"relay+https://r/e"'),
        "environment `a` url of a relay requires auth_bearer_token",
    ),
    (
        entry(id='"a"', url='"relay+https://r/"', auth_bearer_token='"t"'),
        "environment url `relay+https://r/` is invalid: it names no environment",
    ),
    (
        entry(id='"a"', url='"relay+http://far.example/e"', auth_bearer_token='"t"'),
        "exec-server WebSocket headers require wss:// or a loopback destination",
    ),
    (entry(id='"a"', program='" "'), "environment `a` program cannot be empty"),
    (BOX + BOX, "environment id `box` is duplicated"),
    ('default = " "', "default environment id cannot be empty"),
    ('default = "nope"', "default environment `nope` is not configured"),
    ('default = "local"\ninclude_local = false', "default environment `local` is not configured"),
]


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_c11_every_error_has_its_text(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse(text)
    assert caught.value.reason == message
    assert str(caught.value) == PREFIX + message


@pytest.mark.parametrize(
    ("url", "detail"),
    [
        ("ws://", "it names no host"),
        ("ws:///x", "it names no host"),
        ("ws://[::1", "Invalid IPv6 URL"),
        ("ws://h h", "it contains a blank or a control character"),
    ],
)
def test_c11_bad_urls(url: str, detail: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse(entry(id='"a"', url=f'"{url}"'))
    assert caught.value.reason == f"environment url `{url}` is invalid: {detail}"


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("x =", "Invalid value (at end of document)"),
        ("defualt = 'x'", "unknown key `defualt`; did you mean `default`?"),
        ("zzz = 1", "unknown key `zzz`; known are default, include_local, environments"),
        ("default = 1", "`default` must be text in quotes, not a whole number"),
        ("include_local = 1", "`include_local` must be true or false, not a whole number"),
        ("environments = 1", "`environments` must be a list, not a whole number"),
        ("environments = [1]", "`environments` must be a list of tables: write [[environments]] above each"),
        (entry(url='"ws://h"'), "environment number 1 has no `id`"),
        (BOX + entry(id=5), "`id` of environment number 2 must be text in quotes, not a whole number"),
        (
            entry(id='"a"', urll='"ws://h"'),
            "unknown key `urll` of environment `a`; did you mean `url`?",
        ),
        (
            entry(id='"a"', url='"ws://h"', connect_timeout_sec=-1),
            "`connect_timeout_sec` of environment `a` must be a number of seconds, zero or more",
        ),
        (
            entry(id='"a"', url='"ws://h"', initialize_timeout_sec="nan"),
            "`initialize_timeout_sec` of environment `a` must be a number of seconds, zero or more",
        ),
        (
            entry(id='"a"', url='"ws://h"', connect_timeout_sec="true"),
            "`connect_timeout_sec` of environment `a` must be a number, not true or false",
        ),
        (
            entry(id='"a"', program='"p"', args="[1]"),
            "`args` of environment `a` must be text in quotes, not a whole number",
        ),
        (
            entry(id='"a"', program='"p"', env="{K = 1}"),
            "`env.K` of environment `a` must be text in quotes, not a whole number",
        ),
        (
            entry(id='"a"', program='"p"', cwd="2026-01-01"),
            "`cwd` of environment `a` must be text in quotes, not a date or time",
        ),
        (
            entry(id='"a"', program='"p"', skills="{requird = []}"),
            "unknown key `requird` in `skills` of environment `a`; did you mean `required`?",
        ),
    ],
)
def test_c11_a_file_of_the_wrong_form(text: str, detail: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse(text, "/x/environments.toml")
    assert caught.value.reason == f"failed to parse environment config `/x/environments.toml`: {detail}"


def test_the_form_of_the_whole_file_comes_before_what_it_says() -> None:
    with pytest.raises(ConfigurationError, match="unknown key `urll`"):
        parse(entry(id='"local"', program='"p"') + entry(id='"b"', urll='"x"'))


def test_c11_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "environments.toml"
    path.mkdir()
    with pytest.raises(ConfigurationError) as caught:
        load(str(tmp_path), {})
    assert caught.value.reason == (
        f"failed to read environment config `{path}`: Is a directory (os error 21)"
    )
    path.rmdir()
    path.write_bytes(b"default = '\xff'")
    with pytest.raises(ConfigurationError, match="byte 11 is not UTF-8"):
        load(str(tmp_path), {})


@pytest.mark.parametrize("host", ["localhost", "127.0.0.9", "[::1]", "user@127.0.0.1"])
def test_a_token_may_go_to_this_machine(host: str) -> None:
    assert parse(entry(id='"a"', url=f'"ws://{host}:1"', auth_bearer_token='"t"')).ids() == ["local", "a"]


def parsed(text: str) -> Configuration | None:
    """What it says, or None if it was refused; any other failure is one of the test."""
    try:
        return parse(text)
    except ConfigurationError:
        return None


@given(st.text(max_size=200))
def test_any_text_is_a_configuration_or_refused_in_words(text: str) -> None:
    found = parsed(text)
    assert found is None or found.default in (*found.ids(), None)


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["id", "url", "program", "args", "cwd", "auth_bearer_token"]),
            st.sampled_from(['"a"', '"b"', '"ws://127.0.0.1:1"', '["x"]', '" "', "1", '"local"']),
        ),
        max_size=4,
    )
)
def test_what_is_accepted_can_be_used(entries: list[dict[str, str]]) -> None:
    found = parsed("".join(entry(**members) for members in entries))
    if found is not None:
        assert len(found.environments) == len(entries)
        assert len(set(found.ids())) == len(found.ids())
        for environment in found.environments:
            assert isinstance(environment.transport, WebsocketTransport | CommandTransport)


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"env": '{ "A=B" = "c" }'}, "env cannot have a variable named `A=B`"),
        ({"env": '{ "" = "c" }'}, "env cannot have a variable named ``"),
        ({"env": '{ A = "\\u0000" }'}, "env cannot contain a NUL character"),
        ({"args": '["\\u0000"]'}, "args cannot contain a NUL character"),
        ({"cwd": '"/a\\u0000"'}, "cwd cannot contain a NUL character"),
        ({"cwd": '"~/x"'}, "cwd `~/x` must be written out: `~` is not a home directory here"),
    ],
)
def test_a_command_that_cannot_be_started(members: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse(entry(id='"a"', program='"p"', **members), "/home/x/environments.toml")
    assert caught.value.reason == f"environment `a` {said}"


@pytest.mark.parametrize("seconds", ["1e300", "1" + "0" * 400, "18446744073709551616"])
def test_a_time_that_is_none(seconds: str) -> None:
    for key in ("connect_timeout_sec", "initialize_timeout_sec"):
        with pytest.raises(ConfigurationError, match=f"`{key}` of environment `a` is longer than"):
            parse(entry(id='"a"', url='"ws://h"', **{key: seconds}))


def test_messages_are_one_line() -> None:
    for text in (
        entry(id='"a\\nb"', url='"ws://h"'),
        entry(id='"a"', url='"ws://h\\nx"'),
        entry(id='"a"', url='"http://h\\nx"'),
        'default = "a\\nb"\n',
        '"a\\nb" = 1\n',
    ):
        with pytest.raises(ConfigurationError) as caught:
            parse(text)
        assert "\n" not in caught.value.reason
        assert "\\n" in caught.value.reason


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "environments.toml")
    with pytest.raises(ConfigurationError, match=r"failed to read environment config `.*`: not a file"):
        load(str(tmp_path), {})
