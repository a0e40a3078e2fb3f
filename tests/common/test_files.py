"""Files are replaced whole or not at all, and say why they cannot be."""

from __future__ import annotations

import multiprocessing
import os
import pwd
import signal
import tempfile
from pathlib import Path

import pytest

from lightning_cephalo.common import files
from lightning_cephalo.common.errors import PlanError, UnwritableError


def test_the_content_is_on_the_disk_before_the_file_has_its_name(tmp_path, monkeypatch):
    happened = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (happened.append("sync"), sync(file)))
    monkeypatch.setattr(os, "replace", lambda *paths: (happened.append("rename"), replace(*paths)))
    files.write_text(tmp_path / "plan.yaml", "ranks: []")
    assert happened == ["sync", "rename"]
    assert files.read_text(tmp_path / "plan.yaml", what="a plan") == "ranks: []"
    assert [path.name for path in tmp_path.iterdir()] == ["plan.yaml"]


def test_a_reader_sees_the_old_file_until_the_new_one_is_complete(tmp_path):
    path = tmp_path / "figure.png"
    path.write_text("old")
    with files.replacing(path) as beside:
        assert (beside.parent, beside.suffix) == (tmp_path, ".png")
        beside.write_text("half")
        assert path.read_text() == "old"
    assert path.read_text() == "half"


def test_what_fails_on_the_way_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), files.replacing(path) as beside:
        beside.write_text("half")
        raise ZeroDivisionError
    assert path.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["plan.yaml"]


def test_what_a_killed_process_was_writing_is_removed_and_all_else_stays(tmp_path):
    path = tmp_path / "job.json"

    def killed():
        with files.replacing(path) as beside:
            beside.write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=killed)
    process.start()
    process.join()
    (left,) = tmp_path.iterdir()
    elsewhere = left.with_name(f".job.other-host-{process.pid}.tmp.json")
    others = [elsewhere, tmp_path / ".job.tmp.json", tmp_path / ".hidden"]
    for other in others:
        other.write_text("kept")
    with files.replacing(path) as beside:  # of a process that lives
        beside.write_text("whole")
        files.remove_leftovers(tmp_path)
    assert set(tmp_path.iterdir()) == {path, *others}
    files.remove_leftovers(tmp_path / "absent")


def test_a_file_that_cannot_be_written_is_named_with_the_reason_and_a_remedy(tmp_path):
    path = tmp_path / "absent" / "plan.yaml"
    with pytest.raises(UnwritableError, match=r"plan.yaml: cannot be written: No such .*folder"):
        files.write_text(path, "")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(PlanError, match=r"binary.yaml: expected a plan, but it cannot be read"):
        files.read_text(tmp_path / "binary.yaml", what="a plan")


def test_the_cache_folder_is_the_users_choice(monkeypatch, tmp_path):
    monkeypatch.setenv("LIGHTNING_CEPHALO_CACHE", str(tmp_path))
    assert files.cache_folder() == tmp_path
    monkeypatch.delenv("LIGHTNING_CEPHALO_CACHE")
    assert files.cache_folder().name == "lightning-cephalo"
    assert isinstance(files.cache_folder(), Path)


@pytest.mark.parametrize(
    ("parse", "kind"), [(files.parse_json, "JSON"), (files.parse_yaml, "YAML")]
)
def test_a_text_that_no_parser_can_read_is_named(parse, kind):
    nested = "nested too deeply"
    for content, reason in (("[" * 2000 + "]" * 2000, nested), ("[" + "9" * 5000 + "]", "digits")):
        with pytest.raises(PlanError, match=f"plan.x: expected a plan in {kind}, but .*{reason}"):
            parse(content, what="a plan", source="plan.x")


@pytest.mark.parametrize(
    ("parse", "content", "place"),
    [
        (files.parse_yaml, "ranks: 1\nunits: 2\nranks: 3\n", "line 3"),
        (files.parse_yaml, "{a: {ranks: 1, ranks: 1}}", "column 16"),
        (files.parse_json, '{"a": [{"ranks": 1, "ranks": 2}]}', ""),
    ],
)
def test_a_key_that_is_there_twice_is_named(parse, content, place):
    """The last value would count, and the first be lost without a word."""
    with pytest.raises(PlanError, match=f"the key 'ranks' is there twice.*{place}"):
        parse(content, what="a plan")


def test_keys_may_replace_those_of_a_merged_mapping():
    assert files.parse_yaml("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}", what="a plan")["b"] == {
        "x": 1,
        "y": 3,
    }


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "plan.yaml")
    with pytest.raises(PlanError, match="expected a plan, but it is a pipe"):
        files.read_text(tmp_path / "plan.yaml", what="a plan")


def test_a_user_without_a_home_has_a_cache(tmp_path, monkeypatch):
    """As in a container that runs under a number of which no user is known."""
    for name in ("LIGHTNING_CEPHALO_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def unknown(user):
        raise KeyError(user)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert files.cache_folder() == tmp_path / f"lightning-cephalo-{os.getuid()}"
