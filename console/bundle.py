"""Writes one archive of a run for a bug report, without the secrets that it recognises.

Anybody may have written the run directory. So no link in it is followed, only regular files are
read, and the sizes are limited. `REMOVED` replaces the secrets.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import io
import json
import os
import platform
import re
import tarfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

from console.plans import catalog
from console.sources import launches
from console.supervisor import launch_spec
from console.supervisor.launch_spec import REMOVED
from trainers.contract import VERSION, environ, jsonl, rundir
from trainers.contract.errors import ContractError, RefusedError, UsageError

ENDING = ".tar.gz"
MANIFEST = "MANIFEST.json"
MAX_TOTAL_BYTES = 64 << 20
TAIL_BYTES = 1 << 20
MAX_NAMES = 20_000
"""Largest number of names that are used from one directory."""
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
LEAST_TAIL_BYTES, MAX_LEFT_OUT = 4 << 10, 1000
KEPT = "host names, user names, process ids, IP addresses, paths below the home directory (as ~)"
SHELL_PREFIXES = ("NSA_", "CUDA_", "NCCL_", "TORCH_", "PYTORCH_", "GLOO_", "OMP_", "HF_")
PACKAGES = ("torch", "textual", "rich", "psutil", "nvidia-ml-py", "numpy", "pyyaml", "datasets")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,120}")


@dataclass(frozen=True, slots=True)
class Row:
    """Selects at most `most` files of one kind, and the end of each file.

    Each end gets an equal share of `all_bytes`, but at least `LEAST_TAIL_BYTES`, and at most
    `limit_bytes`.
    """

    folder: str
    pattern: str
    limit_bytes: int = TAIL_BYTES
    most: int = 64
    all_bytes: int = 4 << 20


LAUNCH: tuple[Row, ...] = (
    Row("", r"plan\.json|plan_state\.json", limit_bytes=rundir.MAX_DOCUMENT_BYTES),
    Row("", r"events\.jsonl|supervisor\.log|report.*"),
)
TABLE: tuple[Row, ...] = (
    Row("", r"(run|env|supervisor|gates|metrics|metrics_fsdp)\.json", all_bytes=8 << 20,
         limit_bytes=rundir.MAX_DOCUMENT_BYTES),
    Row("", r"events\.jsonl|snapshot\.json|\.HALT.*|\.anomaly_type"),
    Row("verdicts", r"\d+\.json", limit_bytes=1 << 16, most=256),
    Row("requests", r".*\.json", limit_bytes=1 << 14),
    Row("", r"stackdump_rank\d+(_\w+)?\.txt|oom_rank\d+\.txt", most=2048, all_bytes=8 << 20),
    Row("", r"flight_rank\d+_\d+\.json", limit_bytes=4 << 20, all_bytes=12 << 20),
    Row("", r"heartbeat_rank\d+\.jsonl", most=2048, all_bytes=8 << 20),
    Row("", r"samples_.*\.jsonl", most=16),
    Row("logs/attempt*", r"(rank\d+|torchrun)\.log(\.1)?", most=2048, all_bytes=8 << 20),
    Row("", r"(git_sha|collect_env|(dtypes_report|opt_state)\w*)\.txt|.*\.(csv|log)|report.*"),
    Row("", r"mem_\w+\.(txt|json)", most=64, limit_bytes=1 << 20),
    Row("checkpoints", r"latest", limit_bytes=200),
)  # fmt: skip
"""The rows of a run. A file with which the bundle would exceed `MAX_TOTAL_BYTES` is left out."""

# --- secrets -------------------------------------------------------------------------------------

_WORD = (
    r"[\w.-]*(?:(?<!per[_.-])(?<!tik)token|secret|passw(?:or)?d|passphrase|"
    r"(?:api|access|account|private)[_ -]?key|credentials?|cookie|authorization|"
    r"signature|(?<=[_.-])(?:pass|pwd|auth|(?<!text[_.-])key))"
)
"""Names whose value is a secret. The names tiktoken, text_key and per_token do not match."""
_FORM = (
    r"hf_|sk-|gh[pousr]_|github_pat_|xox[bap]-|AKIA|ASIA(?=[A-Z0-9]{16}\b)|glpat-|AIza|nvapi-|"
    r"[rs]k_(?:live|test)_|npm_|pypi-|ya29\.|eyJ[\w-]{8,400}\."
)
_VALUE = r"""(?:"(?:[^"\\\n]|\\.)*"|'[^'\n]*'|[^\s,;&"'}\])]+)"""
_QUOTE = r"""\\{0,8}["']"""
"""A quotation mark. It may be escaped, for example if a record contains a log line."""
_IS = r"\s{0,8}(?:=>|[:=])\s{0,8}"
_WORDS = r"""(?:,\s?"(?:[^"\\]|\\.)*")+"""
_SECRETS: tuple[tuple[str, str], ...] = (
    (rf"""("(?:hook|alive)"\s?:\s?\["(?:[^"\\]|\\.)*"){_WORDS}""", r'\1,"{}"'),
    (r"""([a-z][a-z0-9+.-]{1,20}://)[^/\s"']{1,400}@""", r"\1{}@"),
    (r"(hooks\.slack\.com/services/|/api/webhooks/)[\w/-]+", r"\1{}"),
    (
        rf"""((?:authorization|cookie)(?:{_IS}|{_QUOTE}{_IS}{_QUOTE}))(?![\[{{"'])[^"'\\\n]+""",
        r"\1{}",
    ),
    (r"\b(bearer|basic) +(?=[\w.~-]*[\d=+/])[\w.~+/=-]{8,}", r"\1 {}"),
    (rf"\b(?:{_FORM})[\w-]{{12,}}(?:\.[\w-]+)?", "{}"),
    (
        rf"""(?<![\w.-])("?{_WORD}"?\s?[:=]\s?\{{[^{{}}\n]{{0,400}}?"value"\s?:\s?){_VALUE}""",
        r'\1"{}"',
    ),
    (
        rf"""((?:\({_QUOTE}{_WORD}{_QUOTE},\s?|{_QUOTE}{_WORD}{_QUOTE}{_IS})b?{_QUOTE})[^"'\\\n]+""",
        r"\1{}",
    ),
    (rf"""(?<![\w.-])("{_WORD}"\s?:\s?)(?![\[{{]){_VALUE}""", r'\1"{}"'),
    (rf"""(?<![\w.-])(--?{_WORD}(?:{_QUOTE}\s?,\s?{_QUOTE}|=| +))[^\s"'\\,]+""", r"\1{}"),
    (rf"(?<![\w.-])({_WORD}{_IS})(?![\[{{]){_VALUE}", r"\1{}"),
)
"""Patterns of secrets within one line, each with its replacement; {} is `REMOVED`."""
_FORMS = [(re.compile(form.encode(), re.IGNORECASE), instead.format(REMOVED).encode())
          for form, instead in _SECRETS]  # fmt: skip
_HINT = re.compile(
    rb"(?:token|secret|passwd|password|passphrase|pass|pwd|auth|key|credentials?|cookie|signature|"
    rb"authorization)(?:\\{0,8}[\"'])?\s{0,8}[=:, ]|://[^/\s]{1,400}@|bearer |basic |"
    rb"hooks\.slack\.com/|/api/webhooks/|\"(?:hook|alive)\"|" + _FORM.lower().encode()
)
"""Each line that a pattern of `_SECRETS` matches contains, in lower case, a match of `_HINT`. A
search for `_HINT` is faster than a search for `_SECRETS`."""
_KEY = re.compile(
    rb"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*-----|\Z)|"
    rb"\A[\w+/=\\\s-]*-----END [A-Z ]*PRIVATE KEY-----",
    re.DOTALL,
)
"""A private key, even if its beginning or its end was cut off."""
_SECRET_NAME = re.compile(_WORD + r"|key|auth|pass", re.I)
"""Names of variables whose value is a secret. Files are not searched for key, auth and pass,
because these words occur there too often."""
LEAST_SECRET_CHARS = 6


def is_secret(name: str) -> bool:
    """Returns whether the name of a variable or setting says that its value is a secret."""
    return bool(_SECRET_NAME.fullmatch(name))


class Redactor:
    """Removes secrets from bytes: texts of the known forms, and values of secret `variables`.

    A variable whose value has fewer than `LEAST_SECRET_CHARS` characters does not count.
    """

    def __init__(self, variables: Mapping[str, str]):
        values = {os.fsencode(form) for name, x in variables.items()
                  if is_secret(name) and len(x) >= LEAST_SECRET_CHARS
                  for form in (x, json.dumps(x)[1:-1], quote(os.fsencode(x), safe=""))}  # fmt: skip
        self._values = sorted(values, key=len, reverse=True)
        home = os.fsencode(variables.get("HOME", "").rstrip("/"))
        self._home = re.compile(re.escape(home) + rb"(?![\w.-])") if len(home) > 1 else None

    def redact(self, data: bytes) -> tuple[bytes, int]:
        """Returns two values: the bytes without the secrets found, and the number of secrets.

        `~` replaces the home directory. Secrets next to each other may be counted as one secret.
        """
        before, parts, at = data.count(REMOVED.encode()), list[bytes](), 0
        for value in self._values:
            data = data.replace(value, REMOVED.encode())
        data = _KEY.sub(REMOVED.encode(), data)
        for hint in _HINT.finditer(data.lower()):
            if hint.start() < at:
                continue
            begin, end = data.rfind(b"\n", at, hint.start()) + 1 or at, data.find(b"\n", hint.end())
            end = len(data) if end < 0 else end
            line = data[begin:end]
            for pattern, instead in _FORMS:
                line = pattern.sub(instead, line)
            parts += [data[at:begin], line]
            at = end
        data = b"".join((*parts, data[at:]))
        removed = max(0, data.count(REMOVED.encode()) - before)
        return (self._home.sub(b"~", data) if self._home else data), removed


# --- files ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Archive:
    """The files added to the archive so far, and their manifest."""

    tar: tarfile.TarFile
    redactor: Redactor
    top: str
    files: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[dict[str, str]] = field(default_factory=list)
    bytes: int = 0

    def add(self, name: str, data: bytes, of_bytes: int) -> None:
        """Adds the end of a file (`data`) if it fits; `of_bytes` is the size of the whole file."""
        taken, (data, removed) = len(data), self.redactor.redact(data)
        if self.bytes + len(data) > MAX_TOTAL_BYTES:
            self.leave_out(name, "the bundle has reached its size limit")
            return
        self.files.append({
            "name": name, "size_bytes": len(data), "of_bytes": of_bytes,
            "truncated": taken < of_bytes, "removed": removed,
            "sha256": hashlib.sha256(data).hexdigest(),
        })  # fmt: skip
        self._write(name, data)

    def _write(self, name: str, data: bytes) -> None:
        member = tarfile.TarInfo(f"{self.top}/{name}")
        member.size, member.mtime, member.mode = len(data), int(time.time()), 0o600
        self.bytes += len(data)
        self.tar.addfile(member, io.BytesIO(data))

    def leave_out(self, name: str, why: str) -> None:
        if len(self.left_out) < MAX_LEFT_OUT:
            self.left_out.append({"name": name, "why": why})

    def finish(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """Adds the manifest, and returns it."""
        record = {**about, "files": self.files, "left_out": self.left_out}
        self._write(MANIFEST, jsonl.encode(record))
        return record


def _listed(folder: Path, top: Path) -> list[str]:
    """Returns the names that match `_NAME`, newest first, or [] if `folder` cannot be opened."""
    fd = jsonl.open_inside(folder, None if folder == top else top)
    if fd is None:
        return []
    found: list[tuple[float, str]] = []
    try:
        for name in filter(_NAME.fullmatch, os.listdir(fd)[:MAX_NAMES]):
            with contextlib.suppress(OSError):  # the file no longer exists
                found += [(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mtime, name)]
    except NotADirectoryError:
        return []
    finally:
        os.close(fd)
    return [name for _, name in sorted(found, reverse=True)]


def _names(top: Path, row: Row) -> list[str]:
    """Returns the names that match a row; the last part of `row.folder` may end with `*`."""
    parent, _, last = row.folder.rpartition("/")
    folders = [row.folder]
    if last.endswith("*"):
        folders = [f"{parent}/{name}" for name in _listed(top / parent, top)
                   if name.startswith(last[:-1])]  # fmt: skip
    return [f"{folder}/{name}".lstrip("/") for folder in folders
            for name in _listed(top / folder, top) if re.fullmatch(row.pattern, name)]  # fmt: skip


def _add_row(archive: _Archive, top: Path, row: Row, into: str) -> None:
    names = _names(top, row)
    for name in names[row.most :]:
        archive.leave_out(into + name, f"only the newest {row.most} files are included")
    names = names[: row.most]
    limit = min(row.limit_bytes, max(LEAST_TAIL_BYTES, row.all_bytes // max(1, len(names))))
    for name in names:
        try:
            with jsonl.opened(top / name, below=top) as fd:
                size = os.fstat(fd).st_size
                data = os.pread(fd, limit, max(0, size - limit))
        except OSError as error:
            archive.leave_out(into + name, error.strerror or "cannot be read")
            continue
        if len(data) < size:
            data = data.partition(b"\n")[2] or data  # drop the first line, which may be cut
        archive.add(into + name, data, size)


def _runs(path: Path, run: Path | None) -> Iterator[tuple[Path, str]]:
    """Yields pairs of a run and its folder in the bundle; the pair of `run`, if any, is first."""
    if run is not None:
        yield run, "run/"
    for other in reversed(launches.run_directories(path) if launches.is_launch(path) else ()):
        if run is None or other.name != run.name:
            yield other, f"{other.name}/"


# --- the archive ---------------------------------------------------------------------------------


def facts(variables: Mapping[str, str]) -> dict[str, Any]:
    """Returns versions, host, commit, and the shell variables with a prefix in `SHELL_PREFIXES`."""
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "v": VERSION, "host": launch_spec.host_facts(),
        "git": launch_spec.git_facts(catalog.PROJECT),
        "packages": versions, "console": {"python": platform.python_version()},
        "shell": {name: REMOVED if is_secret(name) else value
                  for name, value in sorted(variables.items()) if name.startswith(SHELL_PREFIXES)},
    }  # fmt: skip


def check(output: Path) -> None:
    """Raises UsageError if a bundle cannot have this name."""
    name = output.name.removesuffix(ENDING)
    if name in ("", output.name) or not output.parent.is_dir():
        raise UsageError(f"--output {output}: it must be NAME{ENDING}, in an existing directory")


def write(path: Path, run: Path | None, output: Path, made: Mapping[str, bytes]) -> dict[str, Any]:
    """Writes the bundle of a launch or run, with the documents in `made`; returns the manifest.

    Raises RefusedError if the file `output` exists, and ContractError if it cannot be written.
    """
    launch, variables = launches.launch_of(path), environ.snapshot()
    made = {"facts.json": jsonl.encode(facts(variables)), **made}
    about = {
        "v": VERSION, "created_ts": time.time(), "id": launches.launch_id(launch or path),
        "run": run.name if run else "", "kept": KEPT,
        "removed": "values of secret-looking names, secret variables of this shell, passwords in "
        "URLs, keys and tokens of known forms, arguments of the operator's hooks",
    }  # fmt: skip
    try:
        fd = os.open(output, NEW_FILE, 0o600)
    except FileExistsError:
        raise RefusedError(f"{output} exists; nothing was written") from None
    except OSError as error:
        raise ContractError(f"cannot write {output}: {error.strerror}") from error
    try:
        with os.fdopen(fd, "wb") as file:
            with tarfile.open(fileobj=file, mode="w:gz", format=tarfile.PAX_FORMAT) as tar:
                archive = _Archive(tar, Redactor(variables), output.name.removesuffix(ENDING))
                for name, data in made.items():
                    archive.add(name, data, len(data))
                for row in LAUNCH if launch else ():
                    _add_row(archive, cast(Path, launch).absolute(), row, "")
                for folder, into in _runs(path, run):
                    if is_link := folder.is_symlink():
                        archive.leave_out(folder.name, "the run is a link")
                    for row in () if is_link else TABLE:
                        _add_row(archive, folder.absolute(), row, into)
                manifest = archive.finish(about)
            file.flush()
            os.fsync(file.fileno())
    except BaseException as error:
        output.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise ContractError(f"cannot write {output}: {error.strerror}") from error
        raise
    return manifest
