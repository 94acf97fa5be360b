"""Finds the files of FineWeb-Edu, on the hub or in a mirror, with entries for the fingerprint."""

from __future__ import annotations

import tempfile
from pathlib import Path

from datasets import load_dataset_builder
from datasets.exceptions import DatasetsError
from huggingface_hub import DatasetCard, HfFileSystem
from huggingface_hub.errors import HfHubHTTPError
from yaml import YAMLError

from trainers.contract import data_access
from trainers.failures import DataError, reason
from trainers.schema import DataSettings

HUB_ERRORS: tuple[type[BaseException], ...] = (OSError, *HfHubHTTPError.__bases__)
"""OSError, and the error of the HTTP library that this version of huggingface_hub uses."""

A_MIRROR = (
    "a mirror is a folder with the README.md of the dataset and the parquet files that its configs "
    "name"
)
ADVICE = f"check data.subset, the network and HF_TOKEN; {data_access.MIRROR}"


def resolve(data: DataSettings) -> tuple[str, list[str], list[str]]:
    """Returns a description, the files of the training split, and their fingerprint entries.

    Raises DataError.
    """
    # Without this check, `datasets` would try for 23 s to reach a hub that does not answer.
    if not data.path and (why := data_access.hub_problem()):
        raise DataError(why)
    place = str(Path(data.path).absolute()) if data.path else data_access.DATASET
    card = str(Path(place, "README.md")) if data.path else data_access.DATASET
    try:
        # Lists this configuration's files only, because a mirror may lack other files.
        configs = DatasetCard.load(card).data.to_dict().get("configs") or ()
        named = {each["config_name"]: each for each in configs}
        if data.subset not in named:
            raise ValueError(f"its card has no such configuration, only {', '.join(named)}")
        with tempfile.TemporaryDirectory(prefix="nsa-datasets-") as cache:
            builder = load_dataset_builder(
                place, data_files=named[data.subset]["data_files"], cache_dir=cache
            )
            files = [str(file) for file in (builder.config.data_files or {}).get("train", [])]
        entry = (lambda file: data_access.fingerprint(file, place)) if data.path else _content
        contents = [entry(file) for file in files]
    except (*HUB_ERRORS, ValueError, TypeError, KeyError, YAMLError, DatasetsError) as error:
        raise DataError(
            f"{place} cannot be opened as {data.subset!r}: {reason(error)}; "
            f"{A_MIRROR if data.path else ADVICE}"
        ) from error
    if not files:
        raise DataError(f"{place} has no files of {data.subset!r}; change data.subset")
    return f"{place} {data.subset}", files, contents


def _content(address: str) -> str:
    """Returns path and blob id of a file on the hub; editing the dataset card changes neither."""
    name = address.rpartition("@")[2].partition("/")[2]
    return f"{name} {HfFileSystem().info(address)['blob_id']}"
