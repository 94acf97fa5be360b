"""Checks files of documents, the hub, and the cached files of the gpt2 tokenizer."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from trainers.contract import environ

DATASET = "HuggingFaceFW/fineweb-edu"
MIRROR = "for a new run, set data.path (--local-path) to a local mirror, or use data.source=text"
PROBE_S = 1.0
SUFFIXES: dict[str, tuple[str, ...]] = {
    "text": ("",), "jsonl": (".jsonl", ".jsonl.gz"), "parquet": (".parquet",),
}  # fmt: skip
"""The endings of file names by source. The dataset card names the files of fineweb_edu."""
GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main"
GPT2_FILES = {
    f"{GPT2_URL}/vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    f"{GPT2_URL}/encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}
"""SHA-256 by address. If a cached file has another hash, tiktoken downloads the file again."""


def is_read(file: Path, root: Path, source: str) -> bool:
    """Returns whether a training with this `source` may read a file below `root`.

    The file must be a regular file or a link to one, must not be empty, and must have an ending of
    `source`. No part of its path below `root` may begin with a dot.

    Raises OSError and ValueError.
    """
    hidden = any(part.startswith(".") for part in file.relative_to(root).parts)
    named = not hidden and file.name.endswith(SUFFIXES[source])
    return named and file.is_file() and file.stat().st_size > 0


def unread_folders(root: Path, pattern: str) -> str:
    """Returns a sentence that names linked folders that `**` in `pattern` does not enter, or "".

    A link to a folder below `root` is left out, because `**` enters that folder itself.
    Raises OSError, ValueError and NotImplementedError.
    """
    begin, stars, _ = pattern.partition("**")
    folders = root.glob(f"{begin}**/*/") if stars else ()
    links = [
        each.relative_to(root) for each in folders
        if each.is_symlink() and not each.resolve().is_relative_to(root.resolve())
    ]  # fmt: skip
    names = sorted(str(each) for each in links if not any(p.startswith(".") for p in each.parts))
    if not names:
        return ""
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
    return (
        f"data.pattern={pattern} does not enter folders that are links: {shown}; link the files "
        "instead of the folder, or set data.path to the folder"
    )


def fingerprint(file: str, root: Path | str) -> str:
    """Returns a file's entry in the fingerprint: its path relative to `root`, and its size."""
    path = Path(file)
    return f"{path.relative_to(root).as_posix()} {path.stat().st_size}"


def hub_problem() -> str:
    """Returns why the hub cannot be used, or "" if the hub or its proxy accepts a connection.

    The DNS lookup has no time limit.
    """
    unread = f"so {DATASET} cannot be read; {MIRROR}"
    if environ.get("HF_HUB_OFFLINE").upper() in ("1", "ON", "YES", "TRUE"):
        return f"HF_HUB_OFFLINE is set, {unread}"
    from urllib import request  # imported here: 1 MiB of memory, and rarely used

    host, proxies = "the hub", request.getproxies()
    try:
        url = urlsplit(environ.get("HF_ENDPOINT") or "https://huggingface.co")
        proxy = proxies.get(url.scheme) or proxies.get("all")
        if proxy and not request.proxy_bypass(url.hostname or ""):
            url = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        host = url.hostname or host
        port = url.port or (80 if url.scheme == "http" else 443)
        socket.create_connection((url.hostname or "", port), PROBE_S).close()
    except OSError as error:
        return f"{host} does not answer, {unread} ({error})"
    except ValueError:  # the text of the error may contain a part of a password
        return f"{host} does not answer, {unread} (its address, or that of its proxy, is no URL)"
    return ""


def gpt2_problem() -> str:
    """Returns why tiktoken cannot use its cached files of the gpt2 tokenizer, or "" if it can."""
    cache = environ.get("DATA_GYM_CACHE_DIR", f"{tempfile.gettempdir()}/data-gym-cache")
    cache = environ.get("TIKTOKEN_CACHE_DIR", cache)
    if not cache:
        return "TIKTOKEN_CACHE_DIR or DATA_GYM_CACHE_DIR is empty, so tiktoken has no cache"
    found = {}
    with contextlib.suppress(OSError):
        for url in GPT2_FILES:
            data = Path(cache, hashlib.sha1(url.encode()).hexdigest()).read_bytes()
            found[url] = hashlib.sha256(data).hexdigest()
    if found != GPT2_FILES:
        return f"files of the gpt2 tokenizer are missing, unreadable or damaged in {cache}"
    return ""
