"""A policy's name that is no folder here: can it be a model on the Hub, and if not, what was probably meant?

Guarantees:

1. A name that only a path can have (`./x`, `/a/b`, `runs/a/b`, `runs/`) is refused without asking the Hub.
2. Of any other one the Hub is asked once, without retries, unless its cache has the model. Libraries that load models
   ask several times for each of several files, with longer and longer pauses: most of a minute, for a slip of the pen.
3. The refusal names the folders that are near.
"""

from __future__ import annotations

import os
from difflib import get_close_matches
from pathlib import Path

MOST_NAMED = 3
RUNS = "runs"
"""Where commands write unless they are told otherwise."""


def why_not_there(name: str, revision: str | None, files: tuple[str, ...]) -> str | None:
    """Say why a name that is no folder stands for no policy; None where the Hub has it, or whoever loads it will see.

    `files`: those that a policy on the Hub may begin with.
    """
    reason = _not_on_the_hub(name, revision, files)
    if reason is None:
        return None
    return f"the policy {name!r} is no folder here{reason}{hint(name)}"


def hint(name: str) -> str:
    """Name the folders that may be meant, as the end of a sentence; nothing where there is none."""
    found = near(name)
    return f"; near that name: {', '.join(found)}" if found else ""


def near(name: str) -> list[str]:
    """Return the folders whose path is like `name`: one part of it written otherwise, or left out in front."""
    wanted = Path(name).expanduser()
    above = next(folder for folder in wanted.parents if folder.is_dir())
    part = wanted.relative_to(above).parts[0]
    rest = wanted.relative_to(above / part)
    alike = [above / other for other in get_close_matches(part, _folders(above), MOST_NAMED)]
    # Of several parts only the first that is missing was looked at: what follows may be right below one that is alike.
    found = [folder / rest for folder in alike if (folder / rest).is_dir()]
    if len(wanted.parts) == 1:
        found += [Path(RUNS) / other for other in get_close_matches(part, _folders(Path(RUNS)), MOST_NAMED)]
    return [str(folder) for folder in found][:MOST_NAMED]


def _not_on_the_hub(name: str, revision: str | None, files: tuple[str, ...]) -> str | None:
    if Path(name).is_file():
        return ", but a file: name the folder that it is in"
    if name.startswith((".", "~", os.sep)) or name.endswith(os.sep) or name.count("/") > 1:
        return ""
    # Clients of HTTP, which a folder need not wait for.
    import httpx
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    if not constants.HF_HUB_OFFLINE and (wrong := _wrong_proxy()):
        return wrong
    try:
        if any(isinstance(try_to_load_from_cache(name, file, revision=revision), str) for file in files):
            return None
        if constants.HF_HUB_OFFLINE:
            return None  # whoever loads it finds out as fast
        # How long an answer may take is the client's own setting, HF_HUB_ETAG_TIMEOUT.
        get_hf_file_metadata(hf_hub_url(name, files[0], revision=revision), timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except HFValidationError:
        return ", and no name of a model on the Hub either"
    except GatedRepoError:
        return None
    except RepositoryNotFoundError:
        return ", and no model on the Hub; of a private one, `hf auth login` comes first"
    except HfHubHTTPError:
        return None  # another file of it is asked for, another revision, or the Hub is in trouble: the loader says so
    except httpx.TransportError as error:
        return f", and the Hub cannot be asked ({type(error).__name__}: {error})"
    return None


def _wrong_proxy() -> str:
    """Say which proxy of the environment no client of HTTP can use, "" when all can be used."""
    import httpx

    try:
        httpx.Client().close()
    except (ValueError, ImportError) as error:
        named = {key: value for key, value in os.environ.items() if key.lower().endswith("_proxy")}
        socks = ", ".join(f"{key}={value}" for key, value in named.items() if value.lower().startswith("socks"))
        return (
            f", and the Hub cannot be asked through the proxy of the environment ({socks or error}): unset it, name an "
            "HTTP proxy in HTTPS_PROXY, or write socks5://HOST:PORT and pip install 'httpx[socks]'"
        )
    return ""


def _folders(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir() if path.is_dir())
    except OSError:
        return []
