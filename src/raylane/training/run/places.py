"""Paths and URLs in the configuration of a run: checked and locked before anything is started, and models fetched.

Two runs in one folder would remove each other's unfinished checkpoints and mix their metrics, and each would look
healthy. The lock is the kernel's (flock on a file `.lock`). The kernel releases it when the process ends for any
reason, so a stale lock cannot exist. Called by the trainers and by the commands that read a configuration.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import socket
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

from raylane.errors import ConfigError
from raylane.training import storage
from raylane.training.config.load import Config
from raylane.training.config.schema import TrainingConfig
from raylane.training.storage import Url


def check_places(config: TrainingConfig) -> None:
    """Raise ConfigError for a URL that no installed package can reach, and for one where only a local path works."""
    require_local("logger.log_dir", config.logger.log_dir, "a line is appended to metrics.jsonl at every step")
    checked = {"policy.model_name": config.policy.model_name, "policy.tokenizer.name": config.policy.tokenizer.name}
    if config.checkpointing.enabled:
        checked["checkpointing.checkpoint_dir"] = config.checkpointing.checkpoint_dir
        checked["checkpointing.resume"] = config.checkpointing.resume
    for key, text in checked.items():
        if text is not None:
            storage.require(key, text)


def require_local(key: str, path: str, reason: str) -> None:
    """Raise ConfigError if the value of a key is a URL; `reason` says why only a local folder works."""
    if storage.is_url(path):
        raise ConfigError(f"{key}={path} must be a local folder: {reason}. Set it to a path on this machine", key=key)


def fetch_models(config: Config, cache_dir: str) -> Config:
    """Return the configuration with local folders in place of model and tokenizer behind URLs and on the hub.

    Downloads them if needed.

    `cache_dir` is the value of `data.cache_dir`. Folders below it that were downloaded before are used again as long as
    names and sizes of the files behind the URL are the same, and their hashes or times if storage has them. Raises
    ConfigError if the URL cannot be read.
    """
    policy = config.policy
    update: dict[str, object] = {}
    if policy.model_name is not None:
        update["model_name"] = _fetched("policy.model_name", policy.model_name, cache_dir)
    if policy.tokenizer.name is not None:
        name = _fetched("policy.tokenizer.name", policy.tokenizer.name, cache_dir)
        update["tokenizer"] = policy.tokenizer.model_copy(update={"name": name})
    return config.model_copy(update={"policy": policy.model_copy(update=update)}) if update else config


HUB = "hf:"
"""Begins the name of a model on the Hugging Face hub."""
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")


def hub_model(key: str, name: str) -> Path:
    """Return the folder of a model hf:NAME, or hf:NAME@REVISION, in the cache of this machine; download it if needed.

    Waits for the hub, at most some seconds if it does not answer. ConfigError with `key` if there is no such model, or
    if the hub does not answer and the cache lacks it.
    """
    from huggingface_hub import snapshot_download

    repository, _, revision = name.removeprefix(HUB).partition("@")
    try:
        folder = snapshot_download(repository, revision=revision or None, allow_patterns=[*_HUB_FILES], etag_timeout=5)
    except Exception as error:  # the library's, of httpx and of the operating system
        raise ConfigError(
            f"{key}={name} cannot be had: {error}. Check the name; without a network, copy the folder to this machine "
            "and give its path",
            key=key,
        ) from error
    return Path(folder)


def _fetched(key: str, text: str, cache_dir: str) -> str:
    if text.startswith(HUB):
        return str(hub_model(key, text))
    place = storage.at(text)
    if not isinstance(place, Url):
        return str(place) if "://" in text else text
    try:
        listing = json.dumps([str(place), sorted(place.versions().items())])
        digest = hashlib.sha256(listing.encode()).hexdigest()[:16]
        folder = Path(cache_dir).resolve() / f"model-{digest}"
        if not folder.is_dir():
            with storage.filled_beside(folder) as draft:
                storage.download(place, draft)
    except OSError as error:
        raise ConfigError(
            f"{key}={text} cannot be copied to data.cache_dir={cache_dir}: {error}. Check the URL, the "
            "credentials of its storage and the free space",
            key=key,
        ) from error
    return str(folder)


LOCK_FILE = ".lock"

_log = logging.getLogger(__name__)


@contextmanager
def lock_folders(folders: Mapping[str, str]) -> Iterator[None]:
    """Create the folders (key of the configuration -> path) and lock them until the `with` block ends.

    Does not wait. Raises ConfigError with key and folder if a folder is not writable or is locked by another run. On a
    file system without locks a warning is logged and the folder is not locked.
    """
    with ExitStack() as stack:
        taken: set[Path] = set()
        for key, folder in folders.items():
            path = Path(folder).resolve()
            if path not in taken:  # two keys may name one folder; a second lock on it would fail against the first
                taken.add(path)
                stack.enter_context(_lock(key, path))
        yield


def _open_lock(path: Path) -> TextIO:
    """Open the lock file for reading and writing; create it if needed.

    ValueError if the file is a link, not a regular file, or another user's: the file is truncated and written to, which
    must not happen to a file that another user has chosen.
    """
    try:
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(f"{path} is a symbolic link. Remove it, or choose another folder") from error
        raise
    status = os.fstat(opened)
    wrong = None
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        wrong = "is no plain file with a single name"
    elif status.st_uid != os.geteuid():
        wrong = f"belongs to user {status.st_uid}, and this process runs as user {os.geteuid()}"
    if wrong:
        os.close(opened)
        raise ValueError(f"{path} {wrong}. Remove it, or choose another folder")
    return os.fdopen(opened, "r+", encoding="utf-8")


@contextmanager
def _lock(key: str, folder: Path) -> Iterator[None]:
    """Create and lock one folder until the `with` block ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = _open_lock(folder / LOCK_FILE)
    except OSError as error:
        raise ConfigError(f"{key}={folder} cannot be written to: {error.strerror or error}", key=key) from error
    except ValueError as error:
        raise ConfigError(f"{key}={folder} is refused: {error}", key=key) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno != errno.EWOULDBLOCK:
                _log.warning("%s=%s cannot be locked (%s); do not start a second run in it", key, folder, error)
            else:
                file.seek(0)
                raise ConfigError(
                    f"{key}={folder} is in use by another run ({file.read().strip() or 'which has just started'}). "
                    "Wait until that run ends, stop it, or choose another folder",
                    key=key,
                ) from error
        # The lock is held now: the text only tells a second run which process holds it.
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield
