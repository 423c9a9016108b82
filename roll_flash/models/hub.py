"""Models of a hub, through huggingface_hub: `ORG/NAME` becomes a folder in its cache, and folders are uploaded.

What the cache holds is used without asking the hub, so that every start of a run uses the same weights; `hf download
ORG/NAME` fetches newer ones. Only config, tokenizer and safetensors are downloaded: small files first, so that a model
that cannot be trained is refused before gigabytes are loaded, and weights that are complete have all the rest beside
them. A download that breaks off goes on where it stopped; after a restart, files that are complete are kept.

The hub is the one of HF_ENDPOINT, else huggingface.co; HF_TOKEN, HF_HOME and HF_HUB_OFFLINE have their usual meaning.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from roll_flash.errors import ModelError, first_line
from roll_flash.models.folder import check_config, weight_files
from roll_flash.terminal import say

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
CALL_TIMEOUT_S = 20.0
"""Timeout of one answer. Downloads have that of huggingface_hub, HF_HUB_DOWNLOAD_TIMEOUT: 10 s without data."""
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SMALL = (".json", ".jinja", ".model", ".txt", ".tiktoken")
_INDEX = "model.safetensors.index.json"


def is_hub_id(name: str) -> bool:
    """True for `ORG/NAME`, if no file or folder has this path."""
    return _ID.fullmatch(name) is not None and not Path(name).exists()


def download_model(name: str, revision: str | None = None) -> Path:
    """Return the folder of the model `ORG/NAME` in the cache of huggingface_hub; download what is missing there.

    `revision`: a branch, tag or commit; None for the main branch. Raises ModelError: no network, no such model or
    revision, no access, no room, nothing that can be trained.
    """
    found = cached_folder(name, revision)
    if found is not None and _is_complete(found):
        return found
    with _explained(name, revision):
        return _download(name, revision)


def download_config(name: str, revision: str | None = None) -> Path:
    """Return config.json of the model `ORG/NAME` in the cache; download it if it is not there. Raises ModelError."""
    from huggingface_hub import hf_hub_download

    found = cached_folder(name, revision)
    if found is not None and (found / "config.json").is_file():
        return found / "config.json"
    with _explained(name, revision):
        return Path(hf_hub_download(name, "config.json", revision=revision))


def cached_folder(name: str, revision: str | None = None) -> Path | None:
    """Return the folder of a model in the cache, complete or not; None if nothing of it is there."""
    from huggingface_hub import try_to_load_from_cache

    for file in ("config.json", ADAPTER_CONFIG):
        if isinstance(found := try_to_load_from_cache(name, file, revision=revision), str):
            return Path(found).parent
    return None


def upload_model(folder: Path, name: str, *, public: bool = False, message: str) -> str:
    """Upload a folder as one commit to `ORG/NAME`, which is made if it does not exist, and return its address.

    Safetensors there that the folder does not have are removed. Raises ModelError: no network, no access, or it exists
    and is public, and `public` is false.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_session

    if not _ID.fullmatch(name):
        raise ModelError(f"{name}: is no name of a model on a hub; write ORG/NAME")
    files = {file.name: file for file in sorted(folder.iterdir()) if file.is_file()}
    with _explained(name, uploads=True):
        get_session().timeout = CALL_TIMEOUT_S
        api = HfApi()
        address = str(api.create_repo(name, private=not public, exist_ok=True))
        about = api.model_info(name, timeout=CALL_TIMEOUT_S)
        if not public and not about.private:
            raise ModelError(f"{name}: everybody can read it on the hub; add --public, or choose another name")
        there = [file.rfilename for file in about.siblings or ()]
        old = [file for file in there if file.endswith(".safetensors") and file not in files]
        added = [CommitOperationAdd(path_in_repo=each, path_or_fileobj=file) for each, file in files.items()]
        removed = [CommitOperationDelete(path_in_repo=each) for each in old]
        say(f"uploading {_text(sum(file.stat().st_size for file in files.values()))} to {address}", error=True)
        api.create_commit(name, [*added, *removed], commit_message=message)
    return address


def _is_complete(folder: Path) -> bool:
    if (folder / ADAPTER_WEIGHTS).is_file():
        return True
    try:
        names = weight_files(folder)
    except ModelError:  # no weights, or an index that is cut short
        return False
    # Without an index it cannot be seen how many files belong together; such models have one.
    return all((folder / each).is_file() for each in names)


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import HfApi, hf_hub_download

    about = HfApi().model_info(name, revision=revision, files_metadata=True, timeout=CALL_TIMEOUT_S)
    sizes = {file.rfilename: file.size or 0 for file in about.siblings or ()}
    first = next((file for file in ("config.json", ADAPTER_CONFIG) if file in sizes), None)
    if first is None:
        raise ModelError(f"{name}: holds neither config.json nor {ADAPTER_CONFIG}{_instead(name, sizes)}")
    # Under its revision, so that the cache remembers which commit that is; the rest from the same commit.
    folder = Path(hf_hub_download(name, first, revision=revision)).parent
    for file in sorted(sizes):
        if "/" not in file and file.endswith(_SMALL):
            hf_hub_download(name, file, revision=folder.name)
    if first == "config.json":
        check_config(folder)
    weights = _wanted_weights(name, folder, sizes)
    missing = [file for file in weights if not (folder / file).is_file()]
    size = sum(sizes[file] for file in missing)
    _require_room(name, folder, size)
    say(f"downloading {name} ({revision or 'main'}, {_text(size)}) to {folder}", error=True)
    for file in missing:
        hf_hub_download(name, file, revision=folder.name)
    return folder


def _wanted_weights(name: str, folder: Path, sizes: Mapping[str, int]) -> list[str]:
    """Names of the files to load: those of the index, or the one of the usual name; no copy in another format."""
    usual = (ADAPTER_WEIGHTS,) if ADAPTER_CONFIG in sizes and "config.json" not in sizes else ("model.safetensors",)
    wanted = weight_files(folder) if _INDEX in sizes else [file for file in usual if file in sizes]
    if not wanted:
        raise ModelError(f"{name}: holds no safetensors{_instead(name, sizes)}")
    if missing := [file for file in wanted if file not in sizes]:
        raise ModelError(f"{name}: its {_INDEX} names {missing[0]}, which is not there; choose another revision")
    return wanted


def _instead(name: str, sizes: Mapping[str, int]) -> str:
    """What to do with a model in another format."""
    gguf = sorted(file for file in sizes if file.endswith(".gguf"))
    if gguf:
        return f"; get one of its GGUF files (hf download {name} {gguf[0]} --local-dir FOLDER) and give its path"
    if any(file.endswith((".bin", ".pt", ".pth")) for file in sizes):
        return ", only weights in PyTorch's own format, which can run code; choose a revision with safetensors"
    return "; it is no model of transformers"


def _require_room(name: str, folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if size > free:
        raise ModelError(
            f"{name}: {_text(size)} are to be downloaded, and {_text(free)} are free on the disk of {folder}; set "
            "HF_HOME to a folder on another disk"
        )


def _text(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB" if size < 2**30 else f"{size / 2**30:,.1f} GiB"


@contextmanager
def _explained(name: str, revision: str | None = None, *, uploads: bool = False) -> Iterator[None]:
    """Raise ModelError, in one line, for what huggingface_hub raises."""
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    try:
        yield
    except errors.GatedRepoError:
        raise ModelError(
            f"{name}: its owner must grant access: ask for it on {hub}/{name}, then set HF_TOKEN to a token of yours"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelError(
            f"{name}: no such folder here, and no such model on {hub}; if it is a private one, set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelError(f"{name}: has no revision {revision} on {hub} (model.revision)") from None
    except errors.HFValidationError as error:
        raise ModelError(f"{name}: {first_line(error)}") from None
    except (OSError, errors.LocalEntryNotFoundError) as error:
        code = getattr(getattr(error, "response", None), "status_code", None)
        if code in (401, 403):
            token = "a token with write access" if uploads else "a token with access"
            raise ModelError(f"{name}: {hub} refuses access ({code}); set HF_TOKEN to {token}") from None
        if code is not None:
            raise ModelError(f"{name}: {hub} answers {first_line(error)}; try again later") from None
        raise _no_network(name, revision, error, uploads=uploads) from None
    except Exception as error:  # of the HTTP library, whose name changes with the version of huggingface_hub
        if not type(error).__module__.startswith("http"):
            raise
        raise _no_network(name, revision, error, uploads=uploads) from None


def _no_network(name: str, revision: str | None, error: Exception, *, uploads: bool) -> ModelError:
    from huggingface_hub import constants

    why = f"is not reached ({first_line(error.__cause__ or error)})"
    if constants.HF_HUB_OFFLINE:
        why = "may not be asked (HF_HUB_OFFLINE)"
    if uploads:
        return ModelError(f"{name}: not uploaded: {constants.ENDPOINT} {why}; try again where there is network")
    at = f" --revision {revision}" if revision else ""
    return ModelError(
        f"{name}: no such folder here, not complete in {constants.HF_HUB_CACHE}, and {constants.ENDPOINT} {why}; on a "
        f"machine with network: hf download {name}{at} --local-dir {name.rpartition('/')[2]}, then copy that "
        "folder here and give its path"
    )
