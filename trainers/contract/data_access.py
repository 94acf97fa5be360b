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
GPT2_FILES = tuple(
    f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{name}"
    for name in ("vocab.bpe", "encoder.json")
)


def hub_problem() -> str:
    """Returns why the hub cannot be used, or "" if the hub or its proxy accepts a connection.

    The DNS lookup has no time limit.
    """
    unread = f"so {DATASET} cannot be read; {MIRROR}"
    if environ.get("HF_HUB_OFFLINE").upper() in ("1", "ON", "YES", "TRUE"):
        return f"HF_HUB_OFFLINE is set, {unread}"
    from urllib import request  # here, because it needs 1 MiB and is rarely used

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
    except ValueError:  # its text may contain a part of a password
        return f"{host} does not answer, {unread} (its address, or that of its proxy, is no URL)"
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
