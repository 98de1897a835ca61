"""Selections as data, and the table that says what a step can have of them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.environments.roots import (
    MAX_ADDED_ROOTS,
    OUTCOMES,
    BadRoot,
    Outcome,
    Seen,
    SelectedRoot,
    candidates,
    combine,
)

P = SelectedRoot.select("plugin@1", "worker", "/plugins/demo")


def root(name: str, environment: str = "worker", path: str = "file:///x") -> SelectedRoot:
    return SelectedRoot(name, environment, path)


# Data --------------------------------------------------------------------------------------------


def test_what_is_written_down() -> None:
    assert P.to_json() == {
        "id": "plugin@1",
        "location": {"type": "environment", "environmentId": "worker", "path": "file:///plugins/demo"},
    }
    assert SelectedRoot.from_json(P.to_json()) == P


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("/plugins/demo", "file:///plugins/demo"),
        ("/with blank/100%", "file:///with%20blank/100%25"),
        ("file:///plugins/demo", "file:///plugins/demo"),
        ("file:///C:/plugins/demo", "file:///C:/plugins/demo"),
        ("C:\\plugins\\a b", "file:///C:/plugins/a%20b"),
        ("d:/50%#?", "file:///D:/50%25%23%3F"),
    ],
)
def test_r16_r35_paths_of_any_system_are_kept_as_uris(given: str, kept: str) -> None:
    selected = SelectedRoot.select("r", "e", given)
    assert selected.path == kept
    assert SelectedRoot.from_json(json.loads(json.dumps(selected.to_json()))) == selected


@pytest.mark.parametrize("path", ["", "relative", "./x", "http://h/x", "~/x"])
def test_a_path_must_be_absolute(path: str) -> None:
    with pytest.raises(BadRoot):
        SelectedRoot.select("r", "e", path)


@pytest.mark.parametrize(
    "value",
    [
        None,
        5,
        {},
        {"id": "r"},
        {"id": "r", "location": None},
        {"id": "r", "location": {"type": "environment", "environmentId": "e"}},
        {"id": "r", "location": {"type": "cloud", "environmentId": "e", "path": "file:///x"}},
        {"id": 5, "location": {"type": "environment", "environmentId": "e", "path": "file:///x"}},
        {"id": "r", "location": {"type": "environment", "environmentId": "e", "path": "x"}},
    ],
)
def test_what_is_no_selection_is_refused(value: object) -> None:
    with pytest.raises(BadRoot):
        SelectedRoot.from_json(value)


@pytest.mark.parametrize("wrong", [("", "e", "/x"), ("r", " ", "/x"), ("r", "e", "")])
def test_a_selection_names_what_it_is(wrong: tuple[str, str, str]) -> None:
    with pytest.raises(BadRoot, match="cannot be empty"):
        SelectedRoot.select(*wrong)
    with pytest.raises(TypeError, match="is text, not NoneType"):
        SelectedRoot.select("r", None, "/x")  # type: ignore[arg-type]


NAMES = st.text(min_size=1).filter(lambda text: bool(text.strip()))


@given(NAMES, NAMES, st.text(alphabet=st.characters(exclude_characters="\0"), max_size=20))
def test_every_selection_survives(root_id: str, environment_id: str, name: str) -> None:
    selected = SelectedRoot.select(root_id, environment_id, "/" + name.encode("utf-8", "replace").decode())
    assert SelectedRoot.from_json(selected.to_json()) == selected


def test_equality_is_over_all_three() -> None:
    assert root("a") == root("a")
    assert len({root("a"), root("b"), root("a", "v"), root("a", path="file:///y")}) == 4


# One step ----------------------------------------------------------------------------------------


class Way:
    """Stands for a handle: all the table asks of one is whether its startup has finished."""

    def __init__(self, finished: bool) -> None:
        self.finished = finished


def test_every_case_has_its_outcome() -> None:
    assert set(OUTCOMES) == set(Seen)


@given(
    roots=st.lists(st.builds(root, st.sampled_from("abc"), st.sampled_from("uvw")), max_size=8),
    captured=st.dictionaries(st.sampled_from("uvw"), st.one_of(st.none(), st.builds(Way, st.booleans()))),
    registry=st.dictionaries(st.sampled_from("uvw"), st.builds(Way, st.booleans())),
)
def test_readiness_and_handle_are_of_one_object(
    roots: list[SelectedRoot], captured: dict[str, Way | None], registry: dict[str, Way]
) -> None:
    found = candidates(roots, captured, registry, lambda way: way.finished)
    for candidate in found:
        name = candidate.root.environment_id
        if name in captured:
            # Captured as ready: that very one, whoever is registered by now. Captured as starting: never.
            assert candidate.handle is captured[name]
            assert candidate.outcome is Outcome.USE
        else:
            assert candidate.handle is registry[name]
            wanted = Outcome.USE_IF_READY if registry[name].finished else Outcome.ASK_TO_START
            assert candidate.outcome is wanted
    # Order is kept, and what is left out is what nobody could give.
    given = [root for root in roots if captured.get(root.environment_id, registry.get(root.environment_id))]
    assert [candidate.root for candidate in found] == given


# Combining ---------------------------------------------------------------------------------------


def test_r32_roots_of_environments_come_after_the_threads_own() -> None:
    reported = root("r")
    assert combine([], [([reported], False)]) == [reported]
    assert combine([P], [([reported], False), ([root("s", "v")], False)]) == [P, reported, root("s", "v")]


def test_r33_the_threads_location_wins() -> None:
    elsewhere = root(P.id, path="file:///elsewhere")
    assert combine([P], [([elsewhere], False)]) == [P]


def test_r34_unless_the_thread_configured_the_environment() -> None:
    elsewhere = root(P.id, path="file:///elsewhere")
    assert combine([P], [([elsewhere], True)]) == [elsewhere]
    # Only for the same root of the same environment.
    assert combine([P], [([root(P.id, "other")], True)]) == [P]


def test_duplicate_ids_the_first_wins() -> None:
    assert combine([root("a"), root("a", "v")], []) == [root("a")]
    assert combine([], [([root("a")], False), ([root("a", "v")], False)]) == [root("a")]


def test_no_more_than_so_many_are_added() -> None:
    many = [root(f"r{number}") for number in range(MAX_ADDED_ROOTS + 10)]
    assert combine([P], [(many, False)]) == [P, *many[:MAX_ADDED_ROOTS]]
    # One that is there already needs no room.
    assert len(combine([P], [([*many[:MAX_ADDED_ROOTS], P], False)])) == MAX_ADDED_ROOTS + 1
