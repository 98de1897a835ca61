"""Images that a model looks at."""

from __future__ import annotations

from pathlib import Path

import pytest

from exec_server.agent.images import BadImage, prompt_image
from support.agent import play
from support.model_server import (
    Say,
    call,
)

PNG = bytes.fromhex("89504e470d0a1a0a") + b"rest of it"


def test_images(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "i.png").write_bytes(PNG)
    (work / "text.png").write_bytes(b"not an image")
    paths = ["i.png", "none.png", ".", "text.png"]
    calls = [call("view_image", {"path": path}, f"call_{number}") for number, path in enumerate(paths)]
    done = play(tmp_path, Say(calls), "ok")
    (image,) = done.output("call_0")
    assert image["type"] == "input_image"
    assert image["image_url"].startswith("data:image/png;base64,iVBORw0KGgpyZXN0")
    assert (
        done.output("call_1")
        == f"unable to locate image at `{work}/none.png`: No such file or directory (os error 2)"
    )
    assert done.output("call_2") == f"image path `{work}` is not a file"
    assert "not a PNG, JPEG, GIF or WebP image" in done.output("call_3")


def test_images_of_a_prompt(tmp_path: Path) -> None:
    (tmp_path / "i.png").write_bytes(PNG)
    opening, image, closing = prompt_image(str(tmp_path / "i.png"), 2)
    assert opening == {"type": "input_text", "text": f'<image name=[Image #2] path="{tmp_path}/i.png">'}
    assert image["image_url"].startswith("data:image/png;base64,")
    assert closing["text"] == "</image>"


@pytest.mark.parametrize(
    ("content", "said"), [(None, "cannot be read: No such file"), (b"x", "is not a PNG")]
)
def test_images_of_a_prompt_that_are_none(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "i.png"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadImage, match=said):
        prompt_image(str(path), 1)


def test_an_image_that_is_too_large(tmp_path: Path) -> None:
    with open(tmp_path / "big.png", "wb") as file:
        file.write(PNG)
        file.truncate(20 * 1024 * 1024 + 1)
    with pytest.raises(BadImage, match="more than 20971520 bytes"):
        prompt_image(str(tmp_path / "big.png"), 1)
    (tmp_path / "work").mkdir()
    (tmp_path / "big.png").rename(tmp_path / "work/big.png")
    done = play(tmp_path, Say([call("view_image", {"path": "big.png"})]), "ok")
    assert "at most 20971520 can be looked at" in done.output()
