"""The functions that entry points of the package name."""

from .integration.plugin import platform, register

__all__ = ["platform", "register"]
