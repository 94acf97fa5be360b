"""`nsa-console bundle`: files of the archive, removed secrets, and hostile run directories."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tarfile
from dataclasses import asdict
from pathlib import Path

import pytest

from console import bundle
from console.bundle import Redactor
from console.settings_file import Settings
from console.sources.record_files import rotated_log
from tests.console.sources import directory
from tests.console.test_cli import cli
from trainers import schema
from trainers.contract import jsonl, rundir
from trainers.contract.errors import ContractError, UsageError

SECRETS = (
    "HF_TOKEN=hf_abcdefghijklmnop", '"HF_TOKEN": "abc\\"def"', "wandb_api_key: 0123456789",
    '"s3.secret": {"value": "abc def", "origin": "plan"}', "https://ann:hunter22@host/x",
    "--password hunter22", '["--api-key","hunter22"]', "Authorization: Bearer abc123def456",
    "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----",
    "x hf_abcdefghijklmnop y", "{'password': 'hunter22'}", "environ({'DB_PASS': 'hunter22'})",
    r'{"text":"{\"password\": \"hunter22\"}"}', "('HF_TOKEN', 'hunter22')",
    "Proxy-Authorization: Basic abcDEFgh", '-H "Authorization: token hunter22"',
    "Cookie: sid=1; id=hunter22", "aws_secret_access_key   =   abc", "ASIAABC4HUNTER22DEFG",
    "https://ann:p@hunter22@host/x", "https://hooks.slack.com/services/T0/B0/hunter22",
    "nvapi-abcdefghijklmnop", "sk_live_abcdefghijklmnop",
    "eyJhbGciOiJIUzI1.hunter22abcd.hunter22", "password => hunter22",
    "MIIabc\nabc\n-----END RSA PRIVATE KEY-----", "db_passwd: hunter22",
)  # fmt: skip
PARTS = ("abc", "ABC4", "hunter22", "0123456789", "def456")
PLAIN = (
    '{"tokens_total": 4096, "toks_per_s": 7.5, "flops_per_token": 1.5}', "PWD=/job",
    '"data.tokenizer": {"value": "byte"}',
    "all_reduce 54 ([450712] float32), in which rank 0 waits", "https://huggingface.co/datasets/x",
    "tiktoken=0.12.0", '{"tokens_per_step": 4, "tokenizer": "x"}',
    "basic attention without tokens", 'File "/job/train.py", line 41 in tokenize',
)  # fmt: skip


@pytest.mark.parametrize("text", SECRETS)
def test_a_secret_is_removed_and_counted(text):
    found, count = Redactor({}).redact(text.encode())
    assert count >= 1
    assert not any(part.encode() in found for part in PARTS), found
    assert b"[removed]" in found


@pytest.mark.parametrize("text", PLAIN)
def test_text_without_a_secret_stays(text):
    assert Redactor({"HOME": "/root"}).redact(text.encode()) == (text.encode(), 0)


@pytest.mark.parametrize("text", ["--token {}", '"A_TOKEN": "{}"', "Authorization: Bearer {}"])
def test_a_secret_of_several_forms_is_counted_once(text):
    secret = "hf_abcdefghijklmnop"
    once, count = Redactor({"MY_KEY": secret}).redact(text.format(secret).encode())
    assert (once.count(b"[removed]"), count) == (1, 1)
    assert Redactor({}).redact(once)[1] == 0


def test_values_of_secret_variables_and_the_home_directory_are_removed_anywhere():
    variables = {"MY_KEY": "correct horse", "HOME": "/home/ann", "NSA_LR": "0.0005"}
    found, _ = Redactor(variables).redact(b"correct horse in /home/ann/x, /home/annabel, 0.0005")
    assert found == b"[removed] in ~/x, /home/annabel, 0.0005"


@pytest.mark.parametrize(
    "name", ["WANDB_KEY", "MY_KEY", "AccountKey", "SharedAccessKey", "DB_PASS", "MY_AUTH",
             "A_TOKEN", "PWD", "OLDPWD", "MONKEY", "KEYBOARD", "LD_PRELOAD"],
)  # fmt: skip
def test_a_name_is_secret_in_a_shell_where_it_is_secret_in_a_file(name):
    texts = (f"export {name}=hunter22;", json.dumps({"flags": {name: "hunter22"}}),
             json.dumps({name: {"origin": "flag", "value": "hunter22"}}))  # fmt: skip
    left = [b"hunter22" in Redactor({}).redact(text.encode())[0] for text in texts]
    assert left == [not bundle.is_secret(name)] * 3
    assert bundle.is_secret(name) == (name not in ("PWD", "OLDPWD", "MONKEY", "KEYBOARD",
                                                   "LD_PRELOAD"))  # fmt: skip


def test_the_name_of_no_setting_is_secret():
    names = schema.keys()
    for value in ("abc", {"value": "abc", "origin": "plan"}):
        text = json.dumps(dict.fromkeys(names, value))
        assert Redactor({}).redact(text.encode()) == (text.encode(), 0)


def test_a_secret_of_this_shell_is_removed_in_its_escaped_forms_too():
    value = 'horse "battery" staple'
    text = f"{json.dumps([value])} horse%20%22battery%22%20staple".encode()
    assert Redactor({"MY_KEY": value}).redact(text)[0] == b'["[removed]"] [removed]'


def test_a_secret_of_this_shell_that_is_not_utf_8_is_removed():
    value = b"gr\xfcn-geheim"
    found = Redactor({"DB_PASSWORD": os.fsdecode(value)}).redact(value + b" gr%FCn-geheim")
    assert found[0] == b"[removed] [removed]"


def test_documents_stay_json_without_their_secrets():
    record = {"environment": {"A_TOKEN": "x\"y", "B": 1, "C_SECRET": None}, "token": 7,
              "passwords": ["a"], "argv": ["--token", "abc", "z"]}  # fmt: skip
    found, _ = Redactor({}).redact(json.dumps(record).encode())
    parsed = json.loads(found)
    assert parsed["environment"] == {"A_TOKEN": "[removed]", "B": 1, "C_SECRET": "[removed]"}
    assert parsed["argv"] == ["--token", "[removed]", "z"]


def test_the_arguments_of_the_hooks_are_removed_and_their_programs_stay():
    """An argument of a hook may be a secret key of any form."""
    page, ping = ("page", "--routing", 'R0"AB'), ("curl", "https://hc-ping.com/1b2c-3d4e")
    settings = asdict(Settings(hook=page, alive=ping))
    for text in (jsonl.encode(settings), json.dumps(settings).encode()):
        found, count = Redactor({}).redact(text)
        assert json.loads(found) == json.loads(text) | {
            "hook": ["page", "[removed]"], "alive": ["curl", "[removed]"],
        }  # fmt: skip
        assert count == 2
    plain = jsonl.encode(asdict(Settings(hook=("page",))))
    assert Redactor({}).redact(plain) == (plain, 0)


def opened(path: Path) -> tuple[dict[str, bytes], dict]:
    """Returns the files of a bundle by their name below its top directory, and its manifest."""
    with tarfile.open(path) as tar:
        assert all(member.isreg() for member in tar)
        files = {
            member.name.partition("/")[2]: tar.extractfile(member).read() for member in tar
        }  # fmt: skip
    manifest = json.loads(files.pop(bundle.MANIFEST))
    assert {each["name"]: each["sha256"] for each in manifest["files"]} == {
        name: hashlib.sha256(data).hexdigest() for name, data in files.items()
    }
    return files, manifest


@pytest.fixture
def hostile(tmp_path) -> Path:
    """A launch with links, a FIFO, odd names, a secret, and files that are too large."""
    launch = directory.launch(tmp_path / "artifacts")
    run = directory.run(launch / "0-first", state="crashed")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "rank0.log").write_text("private words")
    logs = run / "logs" / "attempt1"
    logs.mkdir(parents=True)
    with (logs / "rank0.log").open("wb") as file:
        file.truncate(3 << 30)
        file.seek(0, os.SEEK_END)
        file.write(b"half of a line\nHF_TOKEN=hunter22\nthe last line\n")
    (logs / "rank1.log").symlink_to(tmp_path / "outside" / "rank0.log")
    (run / "logs" / "attempt2").symlink_to(tmp_path / "outside")
    os.mkfifo(run / "gates.json")
    (run / "verdicts").symlink_to(tmp_path / "outside")
    (run / "env.json").mkdir()
    other = directory.run(tmp_path / "outside" / "1-linked")
    (other / "verdicts").mkdir()
    (other / "verdicts" / "1.json").write_text('{"sentence": "private words"}')
    (launch / "1-linked").symlink_to(other)
    (run / "samples_a\nb.jsonl").write_text("{}")
    for rank in range(8):
        count = 40 if rank else 1200
        rundir.heartbeat(run, rank).write_bytes(b'{"msg":"%s"}\n' % (b"x" * 1000) * count)
    return launch


def test_a_hostile_directory_gives_a_bounded_bundle_without_foreign_files(hostile, tmp_path):
    output = tmp_path / "x.tar.gz"
    done = cli(tmp_path, "bundle", str(hostile), "--output", str(output), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    files, manifest = opened(output)
    assert json.loads(done.stdout)["files"] == len(files)
    assert b"private words" not in b"".join(files.values())
    assert files["run/logs/attempt1/rank0.log"].endswith(b"HF_TOKEN=[removed]\nthe last line\n")
    cut = {each["name"] for each in manifest["files"] if each["truncated"]}
    assert {"run/logs/attempt1/rank0.log", "run/heartbeat_rank0.jsonl"} <= cut
    beats = {name: data for name, data in files.items() if "heartbeat" in name}
    assert len(beats) == 8
    assert max(map(len, beats.values())) <= bundle.TAIL_BYTES
    assert all(data.startswith(b'{"msg"') for data in beats.values())
    left = {each["name"] for each in manifest["left_out"]}
    assert {"run/gates.json", "run/env.json", "run/logs/attempt1/rank1.log", "1-linked"} <= left
    assert sum(map(len, files.values())) < bundle.MAX_TOTAL_BYTES
    assert {"status.json", "diagnosis.txt", "diagnosis.json", "facts.json", "plan.json",
            "run/run.json", "run/supervisor.json"} <= files.keys()  # fmt: skip
    assert output.stat().st_mode & 0o777 == 0o600


def test_a_bundle_of_a_launch_has_all_its_phases_and_that_of_a_run_only_this_run(tmp_path):
    launch = directory.launch(tmp_path / "artifacts")
    for name in ("0-first", "1-second"):
        directory.beat(directory.run(launch / name, state="completed"), 0, 1)
    rotated = rotated_log(rundir.rank_log(launch / "0-first", 1, 0))
    rotated.parent.mkdir(parents=True)
    rotated.write_text("a traceback before the rotation")
    directory.end(launch)
    for number, path in enumerate((launch, launch / "0-first")):
        output = tmp_path / f"{number}.tar.gz"
        assert cli(tmp_path, "bundle", str(path), "--output", str(output)).returncode == 0
        files, manifest = opened(output)
        assert manifest["run"] == ("1-second" if path == launch else "0-first")
        assert "run/run.json" in files
        assert ("0-first/heartbeat_rank0.jsonl" in files) == (path == launch)
        assert ("run/logs/attempt1/rank0.log.1" in files) == (path != launch)
        assert not any(name.startswith("1-second/") for name in files)


@pytest.mark.parametrize("named", ["by_hand", "artifacts/first", "artifacts/first/0-first"])
def test_a_bundle_of_a_link_that_the_operator_names_is_that_of_its_directory(tmp_path, named):
    launch = directory.launch(tmp_path / "artifacts", "first", ".").resolve()
    for run in (tmp_path / "by_hand", launch / "0-first"):
        directory.beat(directory.run(run, state="completed"), 0, 1)
    (tmp_path / "link").symlink_to(tmp_path / named)
    found = []
    for path in (tmp_path / named, tmp_path / "link"):
        output = tmp_path / f"{path.name}.tar.gz"
        assert cli(tmp_path, "bundle", str(path), "--output", str(output)).returncode == 0
        found.append((opened(output)[0].keys(), opened(output)[1]["left_out"]))
    assert found[0] == found[1]
    assert {"run/run.json", "run/heartbeat_rank0.jsonl"} <= found[0][0]


def test_a_linked_run_of_a_launch_is_left_out_even_if_it_is_named(hostile, tmp_path):
    output = tmp_path / "x.tar.gz"
    given = ("bundle", str(hostile / "1-linked"), "--output", str(output))
    assert cli(tmp_path, *given).returncode == 0
    assert b"private words" not in b"".join(opened(output)[0].values())


def test_nothing_is_overwritten_and_no_part_stays(hostile, tmp_path):
    output = tmp_path / "x.tar.gz"
    output.symlink_to(tmp_path / "target")
    for words, code in (("x.tar.gz", 4), ("x.zip", 2), (".tar.gz", 2)):
        given = ("bundle", str(hostile), "--output", str(tmp_path / words))
        assert cli(tmp_path, *given).returncode == code
    assert not (tmp_path / "target").exists()
    with pytest.raises(UsageError):
        bundle.check(tmp_path / "nowhere" / "x.tar.gz")
    with pytest.raises(ContractError, match=r"cannot write /proc/self/x\.tar\.gz"):
        bundle.write(hostile, None, Path("/proc/self/x.tar.gz"), {})
    output.unlink()
    output.write_text("mine")
    with pytest.raises(bundle.RefusedError):
        bundle.write(hostile, None, output, {})
    assert output.read_text() == "mine"


def test_a_bundle_that_cannot_be_finished_leaves_nothing(hostile, tmp_path, monkeypatch):
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ContractError, match="No space left"):
        bundle.write(hostile, None, tmp_path / "x.tar.gz", {})
    assert not (tmp_path / "x.tar.gz").exists()


def test_the_size_of_a_bundle_is_bounded_by_kind_and_in_total(hostile, tmp_path, monkeypatch):
    beats = bundle.Row("", r"heartbeat_rank\d+\.jsonl", all_bytes=80_000)
    monkeypatch.setattr(bundle, "TABLE", (beats,))
    manifest = bundle.write(hostile, hostile / "0-first", tmp_path / "x.tar.gz", {})
    sizes = [each["size_bytes"] for each in manifest["files"] if "heartbeat" in each["name"]]
    assert len(sizes) == 8
    assert max(sizes) <= 10_000
    monkeypatch.setattr(bundle, "MAX_TOTAL_BYTES", 40_000)
    manifest = bundle.write(hostile, hostile / "0-first", tmp_path / "y.tar.gz", {})
    assert sum(each["size_bytes"] for each in manifest["files"]) <= 40_000
    assert any("size limit" in each["why"] for each in manifest["left_out"])


def test_a_legacy_run_gives_a_bundle(tmp_path):
    run = directory.legacy(tmp_path / "old", 10.0, 1000.0)
    done = cli(tmp_path, "bundle", str(run), "--output", str(tmp_path / "old.tar.gz"))
    assert done.returncode == 0, done.stderr
    files, _ = opened(tmp_path / "old.tar.gz")
    assert {"run/heartbeat_rank0.jsonl", "run/training.csv"} <= files.keys()
