"""Publishing a release: a reader never sees half of it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from factory.core.workspace import Workspace
from factory.release.published_link import publish_export, read_publication_record


def export(workspace: Workspace, name: str) -> Path:
    folder = workspace.exports / name
    folder.mkdir()
    (folder / "config.json").write_text(name)
    return folder


def test_publish_moves_the_link_and_writes_the_note(workspace: Workspace) -> None:
    first, second = export(workspace, "segment-1"), export(workspace, "segment-2")
    publish_export(workspace, 1, first, "a" * 64)
    publish_export(workspace, 2, second, "b" * 64)
    publish_export(workspace, 2, second, "b" * 64)
    assert (workspace.exports / "champion" / "config.json").read_text() == "segment-2"
    assert os.readlink(workspace.exports / "champion") == "segment-2", "relative, so that the workspace can be moved"
    note = read_publication_record(workspace)
    assert note is not None and note["release"] == 2 and note["export_sha256"] == "b" * 64
    assert sorted(p.name for p in workspace.exports.iterdir()) == [
        "champion",
        "segment-1",
        "segment-2",
        "serving.json",
    ]


def test_an_interrupted_publish_is_noticed(workspace: Workspace) -> None:
    first, second = export(workspace, "segment-1"), export(workspace, "segment-2")
    publish_export(workspace, 1, first, "a" * 64)
    note = json.loads((workspace.exports / "serving.json").read_text())
    (workspace.exports / "serving.json").write_text(json.dumps(note | {"release": 2, "export": "segment-2"}))
    assert read_publication_record(workspace) is None
    assert (workspace.exports / "champion" / "config.json").read_text() == "segment-1", "a whole model is still served"
    (workspace.exports / ".champion.new").symlink_to("nowhere")
    (workspace.exports / ".serving.json.0123456789ab.part").write_text("{")
    publish_export(workspace, 2, second, "b" * 64)
    assert not list(workspace.exports.glob(".*"))
    assert (read_publication_record(workspace) or {})["release"] == 2


@pytest.mark.parametrize("note", ["", "[]", "{}", '{"export": 3}'])
def test_a_release_with_a_damaged_note_does_not_count_as_served(workspace: Workspace, note: str) -> None:
    publish_export(workspace, 1, export(workspace, "segment-1"), "a" * 64)
    (workspace.exports / "serving.json").write_text(note)
    assert read_publication_record(workspace) is None
