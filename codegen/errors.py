"""The errors that the generator raises. Each message names what was asked, what is wrong and how to fix it."""

from __future__ import annotations


class NormforgeError(Exception):
    """Base class of every error that normforge raises, in the generator and in the runtime."""


class IllegalCombinationError(NormforgeError, ValueError):
    """A combination of axes that no kernel can serve, in a manifest or in a call."""


class ManifestError(NormforgeError, ValueError):
    """A manifest that cannot be used; the message starts with file, line and group."""


class TileTableError(NormforgeError, ValueError):
    """A table of tiles that cannot be used; the message starts with file, line and class."""


class TemplateError(NormforgeError, ValueError):
    """A template that cannot be rendered, or whose output is not Python; the message starts with file and line."""


class SelectionError(NormforgeError, ValueError):
    """A --filter or --where that cannot be parsed, or that matches no instance."""


class FolderError(NormforgeError, OSError):
    """An output folder that cannot be written, or that holds files that normforge did not write."""
