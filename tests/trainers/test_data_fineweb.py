"""FineWeb-Edu from a mirror and from a hub, and the errors if it cannot be read."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from tests.trainers.files import write
from tests.trainers.hub_server import Hub, serve
from tests.trainers.runs import ROOT, python
from trainers import fwe_smoke
from trainers.contract import data_access
from trainers.documents import find
from trainers.failures import CONFIG, DATA, DONE, DataError
from trainers.schema import DataSettings
from trainers.stream import Stream

CARD = """---
configs:
- config_name: default
  data_files: [{split: train, path: data/*.parquet}]
- config_name: sample-10BT
  data_files: [{split: train, path: sample/10BT/*.parquet}]
---
"""


@pytest.fixture(scope="module")
def mirror(tmp_path_factory):
    """A folder like the dataset's repository, without the files of its first configuration."""
    path = tmp_path_factory.mktemp("mirror")
    (path / "README.md").write_text(CARD)
    for part in range(3):
        write(path / f"sample/10BT/{part:03}.parquet", [f"{part}/{i} " * 40 for i in range(60)])
    return path


def test_a_mirror_is_the_files_of_the_named_configuration(mirror, tmp_path, monkeypatch):
    data = DataSettings(source="fineweb_edu", path=str(mirror))
    docs = find(data, 0, False)
    assert sorted(Path(file).name for file in docs.files) == [
        "000.parquet", "001.parquet", "002.parquet",
    ]  # fmt: skip
    moved = tmp_path / "moved"
    os.symlink(mirror, moved)
    monkeypatch.chdir(tmp_path)
    for path in (str(moved), "moved", f"../{tmp_path.name}/moved/"):
        again = find(DataSettings(source="fineweb_edu", path=path), 0, False)
        assert again.digest == docs.digest, "a mirror may be moved between two runs"
    assert not [path for path in tmp_path.iterdir() if path != moved]


def test_the_loader_check_reads_a_mirror_and_prints_its_pace(mirror, capsys):
    words = ["--seq-len", "256", "--batch", "2", "--local-path", str(mirror)]
    assert fwe_smoke.main(words) == DONE
    out = capsys.readouterr().out
    assert all(word in out for word in ("3 files", "tokens/s", "20 batches of 2 × 256"))


FROM_THE_HUB = """
from trainers import fwe_smoke
from trainers.schema import DataSettings
from trainers.stream import Stream
assert fwe_smoke.main(["--seq-len", "256", "--batch", "2"]) == 0
stream = Stream(DataSettings(source="fineweb_edu"), 0)
assert all("@{revision}/" in file for lane in stream._lanes for file in lane._files)
print(stream.fingerprint)
print(bytes(stream.read(40, 0, 1)[0].flatten().tolist()).hex())
"""


def from_the_hub(tmp_path: Path, served: Hub) -> list[str]:
    """Returns the output of `trainers.fwe_smoke`, the fingerprint, and the first bytes."""
    flags = {"HF_ENDPOINT": served.endpoint, "HF_HUB_OFFLINE": "0", "PYTHONPATH": str(ROOT)}
    program = FROM_THE_HUB.replace("{revision}", served.revision)
    done = python(tmp_path, "-c", program, cwd=tmp_path, **flags)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_hub_is_read_by_ranges_at_one_revision_and_gives_the_bytes_of_its_mirror(
    mirror, tmp_path
):
    """A later revision with the same files, such as after an edit of the card, is the same data."""
    with serve(mirror, data_access.DATASET) as served:
        said, fingerprint, came = from_the_hub(tmp_path, served)
        asked = [(name, limits) for name, method, limits in served.served if method == "GET"]
        served.revision = "a" * 40
        assert from_the_hub(tmp_path, served)[1:] == [fingerprint, came]
    assert said.startswith("HuggingFaceFW/fineweb-edu sample-10BT (3 files)")
    assert all(word in said for word in ("tokens/s", "p50", "p95", "20 batches of 2 × 256"))
    data = DataSettings(source="fineweb_edu", path=str(mirror))
    expected = Stream(data, 0).read(40, 0, 1)[0]
    assert bytes.fromhex(came) == bytes(expected.flatten().tolist())
    assert {name for name, _ in asked} == {
        "README.md", "000.parquet", "001.parquet", "002.parquet",
    }  # fmt: skip
    assert all(limits for name, limits in asked if name != "README.md")


FAILING = """
import sys, time
from trainers import fwe_smoke
time.sleep = lambda _seconds: None  # the hub's library waits before it tries again
sys.exit(fwe_smoke.main(["--seq-len", "256", "--batch", "2"]))
"""


FAILURES = [
    ("/api/", 0, "cannot be opened as 'sample-10BT': "), (".parquet", 0, "cannot be read: "),
    ("/api/", 429, "sample-10BT': 429 "), (".parquet", 403, "cannot be read: 403 "),
]  # fmt: skip


@pytest.mark.parametrize(("breaks", "status", "says"), FAILURES)
def test_a_hub_that_fails_is_told_in_one_sentence(mirror, tmp_path, breaks, status, says):
    """The hub ends connections or answers with an error, for the list of files or for a file."""
    with serve(mirror, data_access.DATASET) as served:
        served.breaks, served.status = breaks, status
        flags = {"HF_ENDPOINT": served.endpoint, "HF_HUB_OFFLINE": "0", "PYTHONPATH": str(ROOT)}
        done = python(tmp_path, "-c", FAILING, cwd=tmp_path, **flags)
    assert done.returncode == DATA, done.stderr
    *_, sentence = done.stderr.splitlines()
    assert sentence.startswith("trainers.fwe_smoke: ")
    assert says in sentence
    assert "HF_TOKEN" in sentence
    assert "repair" not in sentence
    assert "Traceback" not in done.stderr


def test_no_network_is_told_within_a_second_or_two(tmp_path, monkeypatch, capsys):
    """The cases: no server listens; a server never accepts; HF_HUB_OFFLINE is set."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    data = DataSettings(source="fineweb_edu")
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        port = full.getsockname()[1]
        waiting = [socket.socket() for _ in range(3)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(("127.0.0.1", port))
        for endpoint in ("http://127.0.0.1:1", f"http://127.0.0.1:{port}"):
            monkeypatch.setenv("HF_ENDPOINT", endpoint)
            began = time.monotonic()
            with pytest.raises(DataError, match=r"127\.0\.0\.1 does not answer.*--local-path"):
                find(data, 0, False)
            assert time.monotonic() - began < 60
        for each in waiting:
            each.close()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fwe_smoke.main([]) == DATA
    error = capsys.readouterr().err
    assert "HF_HUB_OFFLINE is set" in error
    assert error.count("\n") == 1


SPOILED = {
    "no card": ("", "README.md"),
    "no files": (CARD, "data files"),
    "other subset": (CARD.replace("10BT", "100BT"), "only default, sample-100BT"),
    "no configs": ("---\nconfigs: [3]\n---\n", "configs name"),
    "cut": (CARD, "000.parquet cannot be read"),
}


@pytest.mark.parametrize("spoiled", SPOILED)
def test_a_mirror_that_is_none_is_told_in_one_sentence(tmp_path, spoiled, capsys):
    path = tmp_path / "bad"
    path.mkdir()
    card, words = SPOILED[spoiled]
    if card:
        (path / "README.md").write_text(card)
    if spoiled != "no files":
        write(path / "sample/10BT/000.parquet", ["x" * 99] * 50)
    if spoiled == "cut":
        file = path / "sample/10BT/000.parquet"
        file.write_bytes(file.read_bytes()[:-50])
    assert fwe_smoke.main(["--local-path", str(path)]) == DATA
    error = capsys.readouterr().err
    assert str(path) in error
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--local-path", "/no/such"), "there is no such folder"),
        (("--batches", "0"), "--batches cannot be '0'; it takes a whole number from 1 to 2^20"),
        (("--batch", "9999999"), "--batch: train.batch_size cannot be '9999999'; it takes a whole"),
    ],
)
def test_wrong_words_of_the_loader_check_are_refused(words, says, capsys):
    assert fwe_smoke.main(words) == CONFIG
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
