"""TOML files that come with the package, or a user's own in their place: read and validated."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

Model = TypeVar("Model", bound=BaseModel)


def load_toml(model: type[Model], source: str, folder: str, unknown: str, error: type[ValueError]) -> Model:
    """`source` is a file, or the name (without .toml) of one in the package's `folder`.

    Raises `error`: `unknown` and the known names for a source that is neither; else naming file and key.
    """
    bundled = files("optimus_compiler") / folder
    if Path(source).is_file():
        text = Path(source).read_text(encoding="utf-8")
    elif (bundled / f"{source}.toml").is_file():
        text = (bundled / f"{source}.toml").read_text(encoding="utf-8")
    else:
        known = sorted(entry.name.removesuffix(".toml") for entry in bundled.iterdir() if entry.name.endswith(".toml"))
        raise error(f"{unknown} {', '.join(known)}")
    try:
        return model.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as fault:
        raise error(f"{source} is not valid TOML: {fault}") from None
    except ValidationError as fault:
        first = fault.errors()[0]
        raise error(f"{source}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
