"""Checks that the hub answers, and that the gpt2 tokenizer's files are in the local cache."""

from __future__ import annotations

import hashlib
import socket
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from trainers.contract import environ

DATASET = "HuggingFaceFW/fineweb-edu"
MIRROR = "set data.path (--local-path) to a local mirror, or use data.source=text"
PROBE_S = 1.0
PORTS = {"https": 443, "http": 80}
GPT2_FILES = tuple(
    f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{name}"
    for name in ("vocab.bpe", "encoder.json")
)


def hub() -> tuple[str, int]:
    """Returns host and port of the hub or proxy; a reason and 0 if HF_HUB_OFFLINE is set."""
    if environ.get("HF_HUB_OFFLINE").upper() in ("1", "ON", "YES", "TRUE"):
        return "HF_HUB_OFFLINE is set", 0
    from urllib import request  # imported here: 1 MiB, rarely needed

    url = urlsplit(environ.get("HF_ENDPOINT") or "https://huggingface.co")
    proxy = request.getproxies().get(url.scheme)
    if proxy and not request.proxy_bypass(url.hostname or ""):
        url = urlsplit(proxy)
    return url.hostname or "", url.port or PORTS.get(url.scheme, 443)


def hub_problem() -> str:
    """Returns why the hub cannot be read, or "" if it answers. The DNS lookup has no time limit."""
    host, port = hub()
    if not port:
        return f"{host}, so {DATASET} cannot be read; {MIRROR}"
    try:
        socket.create_connection((host, port), PROBE_S).close()
    except OSError as error:
        return f"{host} does not answer, so {DATASET} cannot be read; {MIRROR} ({error})"
    return ""


def gpt2_cache() -> Path:
    """Returns the folder of tiktoken's cached files."""
    named = environ.get("TIKTOKEN_CACHE_DIR") or environ.get("DATA_GYM_CACHE_DIR")
    return Path(named or Path(tempfile.gettempdir()) / "data-gym-cache")


def gpt2_problem() -> str:
    """Returns a sentence if files of the gpt2 tokenizer are missing in the cache, or else ""."""
    cache = gpt2_cache()
    if all((cache / hashlib.sha1(url.encode()).hexdigest()).is_file() for url in GPT2_FILES):
        return ""
    return f"the files of the gpt2 tokenizer are not in {cache}"
