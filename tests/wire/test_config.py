"""Configuration messages: choosing keys, and writing TOML that reads the same."""

from __future__ import annotations

import datetime as dt
import math
import tomllib
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exec_server.wire.config import (
    ConfigLayer,
    ConfigLayers,
    ConfigReadResult,
    decode_config_read,
    select_paths,
    write_toml,
)
from exec_server.wire.errors import INVALID_PARAMS, RpcError


def test_names_on_the_wire() -> None:
    params = decode_config_read({"cwd": "file:///", "configPaths": [["a"]], "requirementsPaths": []})
    assert params.config_paths == [["a"]]
    layers = ConfigLayers([ConfigLayer("user (x)", "file:///", "")], 0)
    assert msgspec.to_builtins(ConfigReadResult(None, "file:///", None, layers, ConfigLayers([], 0))) == {
        "userHomeDir": None,
        "codexHomeDir": "file:///",
        "hostname": None,
        "config": {
            "layers": [{"source": "user (x)", "baseDir": "file:///", "toml": ""}],
            "cloudInsertionIndex": 0,
        },
        "requirements": {"layers": [], "cloudInsertionIndex": 0},
    }


# Choosing ----------------------------------------------------------------------------------------

TABLE: dict[str, Any] = tomllib.loads(
    """
    z = 1
    model = "x"
    [servers.a]
    command = "foo"
    [servers.b]
    url = "u"
    [empty]
    [[list]]
    x = 1
    """
)


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ([["model"]], {"model": "x"}),
        ([["nothing"], ["nothing", "there"]], {}),
        ([["servers", "a"]], {"servers": {"a": {"command": "foo"}}}),
        ([["servers", "zz"]], {"servers": {}}),
        ([["servers", "a", "zz"]], {"servers": {"a": {}}}),
        ([["model", "inside"]], {"model": "x"}),
        ([["list", "x"]], {"list": [{"x": 1}]}),
        ([["empty", "x"]], {"empty": {}}),
        ([["servers", "a"], ["servers"]], {"servers": TABLE["servers"]}),
        ([["servers"], ["servers", "a", "command"]], {"servers": TABLE["servers"]}),
    ],
)
def test_choosing(paths: list[list[str]], expected: dict[str, Any]) -> None:
    assert select_paths(TABLE, paths) == expected


def test_the_order_of_the_file_is_kept() -> None:
    assert list(select_paths(TABLE, [["servers"], ["model"], ["z"]])) == ["z", "model", "servers"]


# Writing -----------------------------------------------------------------------------------------


def test_how_it_looks() -> None:
    assert write_toml({}) == ""
    assert write_toml({"a": {}}) == "[a]\n"
    assert write_toml(TABLE) == (
        'z = 1\nmodel = "x"\n\n[servers.a]\ncommand = "foo"\n\n[servers.b]\nurl = "u"\n\n[empty]\n\n'
        "[[list]]\nx = 1\n"
    )
    mixed = {"when": dt.datetime(1979, 5, 27, 7, 32, tzinfo=dt.UTC), "some key": [1, {"a": [{}]}]}
    assert write_toml(mixed) == 'when = 1979-05-27T07:32:00Z\n"some key" = [1, { a = [{}] }]\n'


def test_what_toml_does_not_have() -> None:
    with pytest.raises(TypeError, match="NoneType"):
        write_toml({"a": None})


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
offsets = st.builds(dt.timezone, st.integers(-1439, 1439).map(lambda m: dt.timedelta(minutes=m)))
scalars = st.one_of(
    text,
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.dates(),
    st.times(),
    st.datetimes(),
    st.datetimes(timezones=offsets),
)
keys = text | st.sampled_from(["a", "b-c", "1", "", "x.y", "é"])
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(keys, values, max_size=4))
@example({"a": [{}, {"b": [{}]}], "b": {"": {"c": 1, "d": {}}}})
@example({"s": "\0\x7f\t\r\n\"'\\\u0085\u2028\U0001f600"})
@example({"f": [1e16, 1e-7, -0.0, float("inf"), 5e-324]})
def test_what_is_written_reads_the_same(table: dict[str, Any]) -> None:
    assert tomllib.loads(write_toml(table)) == table


def test_nan_stays_nan() -> None:
    assert math.isnan(tomllib.loads(write_toml({"a": math.nan}))["a"])


GOOD: dict[str, Any] = {"cwd": "file:///", "configPaths": [["a"]], "requirementsPaths": []}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (None, "invalid type: null, expected struct EnvironmentConfigReadParams"),
        ({}, "missing field `cwd`"),
        ({"cwd": "file:///"}, "missing field `configPaths`"),
        ({"cwd": "file:///", "configPaths": []}, "missing field `requirementsPaths`"),
        (GOOD | {"cwd": None}, "invalid type: null, expected a string"),
        (GOOD | {"cwd": "x"}, "invalid URI: relative URL without a base"),
        (GOOD | {"configPaths": None}, "invalid type: null, expected a sequence"),
        (GOOD | {"configPaths": ["x"]}, 'invalid type: string "x", expected a sequence'),
        (GOOD | {"configPaths": [["a", 1]]}, "invalid type: number, expected a string"),
        (GOOD | {"requirementsPaths": {}}, "invalid type: map, expected a sequence"),
        ({"configPaths": 1, "cwd": 1}, "invalid type: number, expected a sequence"),
        ({"cwd": "x", "configPaths": 1}, "invalid URI: relative URL without a base"),
    ],
)
def test_which_mistake_is_reported(params: Any, message: str) -> None:
    with pytest.raises(RpcError) as caught:
        decode_config_read(params)
    assert (caught.value.code, caught.value.message) == (INVALID_PARAMS, message)
