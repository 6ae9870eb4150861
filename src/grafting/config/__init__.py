"""One resolved configuration: schema, defaults, presets."""

from grafting.config.load import resolve, resolve_files
from grafting.config.schema import Config

__all__ = ["Config", "resolve", "resolve_files"]
